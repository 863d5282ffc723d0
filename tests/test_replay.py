"""Sources that replay and record, without Megatron: any cut of the rows takes from a record what the whole would."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from records import assert_records_equal, changed, random_record, without
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mcore_dsa import SelectionRecord
from mcore_dsa.collectives import SelectionGather
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.replay import Recorder, Replay, Replayed
from mcore_dsa.settings import Partition
from mcore_dsa.source import SelectionRequest

BUDGET, POOL = 4, 3


def never() -> Any:
    pytest.fail("the projections run")


class Fixed:
    """A source that gives one id of the plan to every slot of a row that sees a pool, and counts."""

    identity = "fixed"

    def __init__(self) -> None:
        self.calls = 0

    def own_rows(self, request: SelectionRequest) -> Tensor:
        self.calls += 1
        own = request.plan.own
        chosen_BOK = own.first_BS.int().unsqueeze(-1).expand(-1, -1, request.budget).contiguous()
        chosen_BOK = chosen_BOK.masked_fill(own.visible_BS.unsqueeze(-1) == 0, -1)
        chosen_BOK[..., 1:] = -1
        # As a source that scores: what it tells the gather is not what is replayed.
        if request.gather is not None:
            request.gather.advance(chosen_BOK, own.rows)
        return chosen_BOK


def request_of(plan: SelectionPlan, budget: int = BUDGET) -> SelectionRequest:
    class Untouched(SelectionGather):
        def __init__(self) -> None:
            pass

        def advance(self, *_: Any) -> None:
            pytest.fail("the gather hears of rows that are not final")

    return SelectionRequest(1, plan, budget, never, Untouched())


def plans(padded: list[int], lengths: list[int], kind: Partition, tp: int, cp: int) -> Iterator[SelectionPlan]:
    cu, cu_padded = (torch.tensor([0, *accumulate(sizes)]) for sizes in (lengths, padded))
    for cp_rank in range(cp):
        for tp_rank in range(tp):
            yield SelectionPlan.packed(
                cu,
                cu_padded,
                pool_size=POOL,
                budget=BUDGET,
                partition=kind,
                tp_rank=tp_rank,
                tp_size=tp,
                cp_rank=cp_rank,
                cp_size=cp,
            )


@st.composite
def packs(draw: st.DrawFn, cp: int = 1) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 25), min_size=1, max_size=5))
    padded = [-(-length // (2 * cp)) * 2 * cp + draw(st.integers(0, 1)) * 2 * cp for length in lengths]
    return lengths, padded


@pytest.mark.parametrize("cp", [1, 2])
@given(st.data(), st.sampled_from(["off", "contiguous", "zigzag", "balanced"]), st.integers(1, 3))
def test_every_cut_of_the_rows_takes_its_rows(cp: int, data: Any, kind: Partition, tp: int) -> None:
    """Of a record of the same documents, whatever their padding there; ids are those of the plan."""
    lengths, padded = data.draw(packs(cp))
    record = random_record(lengths)
    source = Replayed(replay=Replay(record=record), layer=1, fallback=Fixed())
    of_token = {}
    for document, start in enumerate(accumulate(padded, initial=0)):
        for offset in range(lengths[document] if document < len(lengths) else 0):
            of_token[start + offset] = record.starts[document] + offset
    for plan in plans(padded, lengths, "zigzag" if cp > 1 and kind == "balanced" else kind, tp, cp):
        found_OK = source.own_rows(request_of(plan))[0]
        assert found_OK.dtype == torch.int32
        assert found_OK.shape == (plan.own.rows, BUDGET)
        for found, token, first in zip(
            found_OK.tolist(), plan.own.position_S.tolist(), plan.own.first_BS[0].tolist(), strict=True
        ):
            row = of_token.get(token)
            local = [-1] * BUDGET if row is None else record.selection_xTK[1, row].tolist()
            assert found == [pool if pool < 0 else pool + first for pool in local]


@pytest.mark.parametrize("cp", [1, 2])
def test_a_dense_batch_is_its_samples_one_behind_the_other(cp: int) -> None:
    record = random_record([24, 24])
    for cp_rank in range(cp):
        plan = SelectionPlan.dense(
            24 // cp,
            batch=2,
            pool_size=POOL,
            budget=BUDGET,
            partition="zigzag",
            tp_rank=1,
            tp_size=2,
            cp_rank=cp_rank,
            cp_size=cp,
        )
        found_BOK = Replayed(replay=Replay(record=record), layer=0, fallback=Fixed()).own_rows(request_of(plan))
        for sample in range(2):
            assert torch.equal(found_BOK[sample], record.selection_xTK[0, plan.own.position_S + 24 * sample])


def replayed(record: SelectionRecord, missing: Any, plan: SelectionPlan) -> tuple[Tensor, int]:
    fallback = Fixed()
    source = Replayed(replay=Replay(record=record, missing=missing), layer=0, fallback=fallback)
    return source.own_rows(request_of(plan))[0], fallback.calls


@pytest.mark.parametrize("kind", ["off", "contiguous", "zigzag"])
def test_rows_without_a_record(kind: Partition) -> None:
    """Documents of 13 and 12 tokens. Of the last rows none is read by others, of a prefix all are."""
    lengths, sound = [13, 12], random_record([13, 12])
    for rank, plan in enumerate(plans(lengths, lengths, kind, 2, 1)):
        position_O = plan.own.position_S
        wanted_OK = replayed(sound, "refuse", plan)[0]
        scored_OK = Fixed().own_rows(replace(request_of(plan), gather=Quiet()))[0]
        for rows, missing, scored, calls in (
            ([12, 24], "score", [12, 24], 1),
            ([12, 24], "leave_out", [], 0),
            ([13, 14, 15, 16, 24], "score", [15, 16, 24], 1),
            ([13, 14, 15, 16, 24], "leave_out", [15, 16], 1),
            # Nothing to select: nothing missing.
            ([0, 1, 13, 14], "refuse", [], 0),
            ([0, 1, 13, 14], "score", [], 0),
        ):
            found_OK, called = replayed(without(sound, rows), missing, plan)
            # Also on a rank that owns none of the rows in question: what scoring exchanges, all ranks enter.
            assert called == calls, (rank, rows, missing)
            is_missing_O, is_scored_O = (torch.isin(position_O, torch.tensor(some)) for some in (rows, scored))
            empty_OK = torch.where((is_missing_O & ~is_scored_O).unsqueeze(1), -1, wanted_OK)
            assert torch.equal(found_OK, torch.where(is_scored_O.unsqueeze(1), scored_OK, empty_OK))


class Quiet:
    def advance(self, *_: Any) -> None:
        pass


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"lengths": [12, 13]}, r"the documents have lengths \[13, 12\] and pools of 3; accepted .* \[12, 13\] and 3"),
    ({"lengths": [25]}, r"accepted for this record are \[25\] and 3"),
    ({"pool_size": 2}, r"accepted for this record are \[13, 12\] and 2"),
    ({"layers": 1}, "the record has 1 layers and budget 4; accepted for layer 1 are more layers and budget 4"),
    ({"budget": 3}, "the record has 2 layers and budget 3; accepted for layer 1 are more layers and budget 4"),
]


@pytest.mark.parametrize(("other", "message"), REFUSED)
def test_a_record_of_something_else_is_refused(other: dict[str, Any], message: str) -> None:
    plan = next(plans([13, 12], [13, 12], "off", 1, 1))
    record = random_record(**{"lengths": [13, 12], **other})
    with pytest.raises(ValueError, match=message):
        Replayed(replay=Replay(record=record), layer=1, fallback=Fixed()).own_rows(request_of(plan))


def test_an_unsound_record_and_missing_rows_are_refused() -> None:
    plan, sound = next(plans([13, 12], [13, 12], "off", 1, 1)), random_record([13, 12])
    with pytest.raises(ValueError, match=r"of layer 0 at row 12, .* is 3; .*twice"):
        replayed(changed(sound, 0, 12, [3, 3]), "score", plan)
    with pytest.raises(ValueError, match="missing is 'refuse' and row 12 has no record; accepted are 'score' and"):
        replayed(without(sound, [12]), "refuse", plan)
    with pytest.raises(ValueError, match="missing is 'guess'; accepted are 'refuse', 'score', 'leave_out'"):
        Replay(record=sound, missing="guess")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"record is torch.int32; accepted is a SelectionRecord"):
        Replay(record=sound.selection_xTK)  # type: ignore[arg-type]


def test_rows_are_located_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, replay = next(plans([13, 12], [13, 12], "zigzag", 2, 1)), Replay(record=random_record([13, 12]))
    Replayed(replay=replay, layer=0, fallback=Fixed()).own_rows(request_of(plan))
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: pytest.fail("located again"))
    Replayed(replay=replay, layer=1, fallback=Fixed()).own_rows(request_of(plan))


def recorded(tp: int, kind: Partition, lengths: list[int], padded: list[int]) -> list[SelectionRecord]:
    """Two forwards of two layers over TP x CP, each replaying a record; what was recorded of them."""
    cp = dist.get_world_size() // tp
    tp_groups = [dist.new_group(range(first, first + tp)) for first in range(0, tp * cp, tp)]
    cp_groups = [dist.new_group(range(first, tp * cp, tp)) for first in range(tp)]
    cp_rank, tp_rank = divmod(dist.get_rank(), tp)
    recorder = Recorder(
        2, tp_group=tp_groups[cp_rank], cp_group=cp_groups[tp_rank], pp_group=None, device=torch.device("cpu")
    )
    plan = list(plans(padded, lengths, kind, tp, cp))[dist.get_rank()]
    for seed in range(2):
        replay = Replay(record=random_record(lengths, padded, seed=seed))
        for layer in range(2):
            source = recorder.around(Replayed(replay=replay, layer=layer, fallback=Fixed()), layer)
            source.own_rows(request_of(plan))
    return recorder.finish()


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("kind", ["off", "contiguous", "zigzag"])
def test_what_is_recorded_is_what_was_selected(tp: int, cp: int, kind: Partition) -> None:
    lengths, padded = [13, 0, 1, 20], [16, 0, 4, 24]
    for records in run_ranks(recorded, tp * cp, tp, kind, lengths, padded):
        for seed, record in enumerate(records):
            assert_records_equal(record, random_record(lengths, padded, seed=seed))
        assert len(records) == 2


def test_a_recompute_is_not_recorded() -> None:
    plan, record = next(plans([13, 12], [13, 12], "off", 1, 1)), random_record([13, 12], layers=1)
    for reentrant in (True, False):
        recorder = Recorder(1, tp_group=None, cp_group=None, pp_group=None, device=torch.device("cpu"))
        asked = []
        source = recorder.around(Replayed(replay=Replay(record=record), layer=0, fallback=Fixed()), 0)

        def forward(x: Tensor, source: Any = source, asked: list[int] = asked) -> Tensor:
            asked.append(int(source.own_rows(request_of(plan)).sum()))
            return x * x

        x = torch.ones(1, requires_grad=True)
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()
        assert len(asked) == 2
        (found,) = recorder.finish()
        assert_records_equal(found, record)


def test_layers_that_ran_unequally_are_told() -> None:
    plan, record = next(plans([13], [13], "off", 1, 1)), random_record([13])
    recorder = Recorder(2, tp_group=None, cp_group=None, pp_group=None, device=torch.device("cpu"))
    for layer in (0, 1, 1):
        recorder.around(Replayed(replay=Replay(record=record), layer=layer, fallback=Fixed()), layer).own_rows(
            request_of(plan)
        )
    with pytest.raises(ValueError, match=r"forwards of the layers of each stage are \[\{0: 1, 1: 2\}\]; accepted is"):
        recorder.finish()
    assert recorder.around(Fixed(), 0).identity == "recorded, fixed"
