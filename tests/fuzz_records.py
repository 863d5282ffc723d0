"""What is fuzzed of selections as data: records, files of them, rollouts, replay."""

import functools
from itertools import accumulate
from typing import Any

import torch
from fuzz import Target
from fuzz_files import changed_file, scratch, written
from hypothesis import strategies as st
from odd import changed_arguments, changed_tensor, integers, tensors, values
from records import as_rollout, fields_of, random_record
from torch import Tensor

from mcore_dsa import SelectionRecord, expand_selection, from_rollout
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.replay import Replay, Replayed
from mcore_dsa.source import SelectionRequest

REFUSAL = (TypeError, ValueError)


@st.composite
def _records(draw: st.DrawFn) -> tuple[dict[str, Any], Any]:
    own = draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    places = [length + draw(st.integers(0, 3)) for length in own]
    fields = fields_of(random_record(own, places))
    other = draw(st.one_of(values, st.just(random_record(own, places, seed=1)), st.just(random_record([5]))))
    lists = st.lists(st.one_of(integers, values), max_size=4).map(tuple)
    if draw(st.booleans()):
        return draw(changed_arguments(fields)), other
    fields[draw(st.sampled_from(("lengths", "padded_lengths")))] = draw(lists)
    return fields, other


def _record(case: tuple[dict[str, Any], Any]) -> None:
    fields, other = case
    record = SelectionRecord(**fields)
    assert isinstance(record.digest, str)
    assert record.missing_T.shape == record.visible_T.shape == record.recorded_T.shape
    record.agreement(other)
    record.check()


@st.composite
def _rollouts(draw: st.DrawFn) -> dict[str, Any]:
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=3))
    tail = draw(st.booleans())
    requests: Any = as_rollout(random_record(lengths), tail=tail)
    sound: dict[str, Any] = {"pool_size": 3, "budget": 4, "always_select_tail": tail}
    places: Any = draw(st.sampled_from((None, [length + 2 for length in lengths])))
    what = draw(st.sampled_from(("tensor", "tensor", "list", "arguments", "places")))
    if what == "tensor":
        place = draw(st.integers(0, len(requests) - 1))
        requests[place] = draw(changed_tensor(requests[place]))
    elif what == "list":
        requests = draw(st.one_of(values, st.lists(st.one_of(tensors(), values), max_size=3)))
    elif what == "arguments":
        sound = draw(changed_arguments(sound))
    else:
        places = draw(st.one_of(values, st.lists(st.one_of(integers, values), max_size=4)))
    return {"requests": requests, "padded_lengths": places, **sound}


def _rollout(case: dict[str, Any]) -> None:
    from_rollout(**case).check()


@functools.cache
def _file() -> bytes:
    return written(lambda folder: random_record([5, 9], [6, 9]).save(folder / "record"))["record"]


def _load(data: bytes) -> None:
    with scratch() as folder:
        (folder / "record").write_bytes(data)
        SelectionRecord.load(folder / "record")


class _Nothing:
    """A source of selections that has none."""

    identity = "nothing"

    def own_rows(self, request: SelectionRequest) -> Tensor:
        own = request.plan.own
        return torch.full((1, own.rows, request.budget), -1, dtype=torch.int32)


@st.composite
def _replays(draw: st.DrawFn) -> tuple[SelectionRecord, dict[str, Any], int, SelectionPlan]:
    """A record that may be unsound, how it is replayed, and a plan of its documents or of others."""
    lengths = draw(st.lists(st.integers(0, 14), min_size=1, max_size=3))
    fields = fields_of(random_record(lengths))
    if draw(st.booleans()):
        name = draw(st.sampled_from(("selection_xTK", "recorded_T")))
        changed = draw(changed_tensor(fields[name]))
        fields[name] = (
            changed if (changed.shape, changed.dtype) == (fields[name].shape, fields[name].dtype) else fields[name]
        )
    replay = {"missing": draw(st.sampled_from(("refuse", "score", "leave_out", "x", None, []))), "layers": None}
    replay["layers"] = draw(st.sampled_from((None, None, 2, 3)))
    others = draw(st.sampled_from((lengths, lengths, [*lengths, 0], lengths[::-1], [5])))
    edges = torch.tensor([*accumulate(others, initial=0)])
    sizes: dict[str, Any] = {"pool_size": 3, "budget": draw(st.sampled_from((4, 4, 2))), "partition": "contiguous"}
    plan = SelectionPlan.packed(edges, tp_rank=draw(st.integers(0, 1)), tp_size=2, **sizes)
    return SelectionRecord(**fields), replay, draw(st.integers(0, 3)), plan


def _replay(case: tuple[SelectionRecord, dict[str, Any], int, SelectionPlan]) -> None:
    record, options, layer, plan = case
    replay = Replay(record=record, **options)
    assert replay.identity.startswith("replayed ")
    request: Any = SelectionRequest(layer, plan, 4, None, None)  # type: ignore[arg-type]
    found = Replayed(replay=replay, layer=layer, fallback=_Nothing()).own_rows(request)
    # What comes can be attended to.
    expand_selection(found, plan.layout, plan.own.position_S, always_select_tail=True)


TARGETS = (
    Target("records", _records(), _record, REFUSAL, 8),
    Target("rollouts", _rollouts(), _rollout, REFUSAL, 8),
    Target("replays", _replays(), _replay, REFUSAL, 6),
    Target("files of records", st.deferred(lambda: changed_file("record", _file())), _load, (ValueError, OSError), 14),
)
