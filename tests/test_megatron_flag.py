"""`SKYRL_DSA_INDEXER_TP_SHARD` in the module: what it changes, when it is read, and how ranks agree on it."""

import itertools
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from megatron.core import parallel_state
from models import BATCH, OFF, ON, POOL, ROWS, SIZES, TOPK, attentions, config, gpt, taken_selections, tokens
from recorder import Recorder

from mcore_dsa import agreement, sharded
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.megatron import KPoolDSAttention, attention
from mcore_dsa.settings import ATTEND_BYTES_VARIABLE, OVERLAP_VARIABLE, PARTITION_VARIABLE, SCORE_BYTES_VARIABLE

LAYERS = 2
FORWARDS = 3
HEADS, DIM = SIZES["dsa_indexer_n_heads"], SIZES["dsa_indexer_head_dim"]
# Long enough for a busy machine, short enough that a hang shows soon.
TIMEOUT_S = 45.0


def inside_selections(log: Recorder) -> list[list[tuple[Any, ...]]]:
    """From here on, for each selection a module obtains `(name, (shape, dtype), ranks of the group)` of each call.

    Shape and dtype are of what a rank sends.
    """
    per_selection: list[list[tuple[Any, ...]]] = []
    original = KPoolDSAttention.forward

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        before = len(log.calls)
        output = original(*args, **kwargs)
        per_selection.append(
            [
                (call.name, call.input and call.input[::-1], dist.get_process_group_ranks(call.group))
                for call in log.calls[before:]
            ]
        )
        return output

    KPoolDSAttention.forward = forward
    return per_selection


class Records(logging.Handler):
    """The log records of this package."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[str, str]] = []
        logger = logging.getLogger("mcore_dsa.megatron")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))


def observe() -> dict[str, Any]:
    """Three forwards of a two-layer model, then one of a second model."""
    records, clock = Records(), itertools.count()
    vars(attention).update(time=SimpleNamespace(perf_counter=lambda: next(clock)))
    with Recorder() as log:
        model = gpt(config())
        while_building = (list(log.calls), list(records.lines), len(agreement._agreed))
        per_selection = inside_selections(log)
        with taken_selections() as taken, torch.no_grad():
            for step in range(FORWARDS):
                model(tokens(step)[:, :-1], None, None)
            gpt(config())(tokens()[:, :-1], None, None)
    layers = attentions(model)
    return {
        "while_building": while_building,
        "per_selection": per_selection,
        "log": records.lines,
        "selections": taken,
        "rows": [layer.counters.rows for layer in layers],
        "scored_rows": [layer.counters.scored_rows for layer in layers],
        "seconds": [layer.indexer_seconds for layer in layers],
        "group": dist.get_process_group_ranks(parallel_state.get_tensor_model_parallel_group()),
    }


def scored_rows(rows: range) -> int:
    """Rows of one sample that see more pools than the budget."""
    return sum((row + 1) // POOL > TOPK // POOL for row in rows)


def assert_observed(seen: dict[str, Any], collectives_of_a_layer: list[tuple[Any, ...]], rows: range) -> None:
    group = seen["group"]
    assert seen["while_building"] == ([], [], 0)
    selections = LAYERS * (FORWARDS + 1)
    assert len(seen["selections"]) == selections
    # Every forward asks whether anything changed; each module agrees in its first, and never again.
    asked = [("all_reduce", None, group)] * (len(group) > 1)
    agreed = [*asked, ("all_gather_object", None, group), *collectives_of_a_layer]
    later = [*asked, *collectives_of_a_layer]
    expected = [agreed] * LAYERS + [later] * (selections - 2 * LAYERS) + [agreed] * LAYERS
    assert seen["per_selection"] == expected
    assert seen["rows"] == [FORWARDS * BATCH * len(rows)] * LAYERS
    assert seen["scored_rows"] == [FORWARDS * BATCH * scored_rows(rows)] * LAYERS
    # The clock stands a second further on at each look: one span a selection, with nothing left out or counted twice.
    assert seen["seconds"] == [FORWARDS] * LAYERS


def gathers(rows: int, group: list[int], *shapes_and_dtypes: tuple[tuple[int, ...], torch.dtype]) -> list[Any]:
    return [("all_gather_single", ((rows, BATCH, 2 * DIM), torch.float32), group)] + [
        ("all_gather_single", what, group) for what in shapes_and_dtypes
    ]


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2), (3, 3)], ids=["tp2", "tp2dp2", "tp3"])
def test_flag_on_shards_rows_and_gathers_selections(world: int, tp: int) -> None:
    own = ROWS // tp
    for rank, seen in enumerate(megatron_ranks(observe, world, tp=tp, env=ON)):
        first = rank - rank % tp
        assert seen["group"] == list(range(first, first + tp))
        shard = range(own * (rank % tp), own * (rank % tp + 1))
        # A row more than its own, with the numbers of the call and of the piece.
        selected = ((BATCH, own + 1, TOPK // POOL), torch.int32)
        assert_observed(seen, gathers(own, seen["group"], selected), shard)
        # Once for the whole run, not once for every tensor-parallel group.
        if rank > 0:
            assert seen["log"] == []
            continue
        line, attends, kernels, others = seen["log"]
        assert {said[0] for said in seen["log"]} == {"INFO"}
        for part in (str(seen["group"]), "contiguous shard of the rows", f"{PARTITION_VARIABLE}='1'"):
            assert part in line[1]
        assert attends[1] == (
            "k-pool DSA attends on each rank its heads of every row (default, MCORE_DSA_ATTEND_SHARD is unset)"
        )
        assert kernels[1] == (
            "k-pool DSA computes with torch (default, MCORE_DSA_KERNELS is unset; "
            "not triton: device is cpu; accepted is cuda)"
        )
        for part in ("MCORE_DSA_SCORE_BYTES 256MiB (default)", "MCORE_DSA_OVERLAP on (default)", "_STORE_BYTES 8GiB"):
            assert part in others[1]


def test_flag_off_gathers_queries_and_scores_every_row_on_every_rank() -> None:
    own = ROWS // 2
    queries = (((own, BATCH, HEADS, DIM), torch.float32), ((own, BATCH, HEADS), torch.float32))
    for rank, seen in enumerate(megatron_ranks(observe, 2, tp=2, env={PARTITION_VARIABLE: None})):
        assert_observed(seen, gathers(own, [0, 1], *queries), range(ROWS))
        if rank == 0:
            line, *_ = seen["log"]
            assert line[0] == "INFO"
            for part in ("[0, 1]", "every rank scores every row", f"default, {PARTITION_VARIABLE} is unset"):
                assert part in line[1]
        else:
            assert seen["log"] == []


def observe_pieces() -> list[int]:
    """Rows of each gather of one selection, where a piece is ten rows."""
    vars(sharded).update(OVERLAP_ROWS=10)
    with Recorder() as log, torch.no_grad():
        per_selection = inside_selections(log)
        gpt(config(num_layers=1))(tokens()[:, :-1], None, None)
    return [what[0][1] - 1 for _, what, _ in per_selection[0][3:]]


@pytest.mark.parametrize(("word", "pieces"), [("1", [10, 10, 10, 10, 8]), ("0", [48])])
def test_overlap_setting_reaches_the_exchange(word: str, pieces: list[int]) -> None:
    assert megatron_ranks(observe_pieces, 2, tp=2, env={**ON, OVERLAP_VARIABLE: word}) == [pieces] * 2


def test_flag_on_in_a_group_of_one_warns_once() -> None:
    (seen,) = megatron_ranks(observe, 1, tp=1, env=ON)
    assert seen["while_building"] == ([], [], 0)
    assert [level for level, _ in seen["log"]] == ["WARNING", *["INFO"] * 4]
    assert f"{PARTITION_VARIABLE} has no effect in a tensor-parallel group of one" in seen["log"][0][1]
    assert "the one rank scores every row" in seen["log"][1][1]
    assert seen["rows"] == [FORWARDS * BATCH * ROWS] * LAYERS
    (off,) = megatron_ranks(observe, 1, tp=1, env=OFF)
    assert [level for level, _ in off["log"]] == ["INFO"] * 4
    assert all(torch.equal(*pair) for pair in zip(seen["selections"], off["selections"], strict=True))


def read_when_built() -> tuple[str | None, int]:
    os.environ[PARTITION_VARIABLE] = "1"
    model = gpt(config(num_layers=1))
    os.environ[PARTITION_VARIABLE] = "0"
    with torch.no_grad():
        model(tokens()[:, :-1], None, None)
    (layer,) = attentions(model)
    return layer.settings.partition.value, layer.counters.rows


def test_flag_is_read_when_the_module_is_built() -> None:
    assert megatron_ranks(read_when_built, 2, tp=2, env=OFF) == [("contiguous", BATCH * ROWS // 2)] * 2


def refuse(*_args: Any) -> int:
    raise RuntimeError("a score depends on its place in the tile")


def attempt(fault: str) -> tuple[str, list[str]]:
    """Where a model stops, in its building or its forward, and what it says in each of two forwards."""
    rank = dist.get_rank()
    overrides: dict[str, Any] = {"num_layers": 1}
    if fault == "topk" and rank == 1:
        overrides["dsa_indexer_topk"] = 2 * TOPK
    if fault == "tail" and rank == 1:
        overrides["dsa_indexer_kpool_always_select_tail"] = False
    if fault == "bits" and rank == 1:
        TorchBackend.fingerprint = staticmethod(lambda *_args: "other bits")
    if fault == "tile" and rank == 1:
        TorchBackend.fingerprint = staticmethod(refuse)
    if fault == "later":
        # Both ranks have agreed on both settings; then one changes.
        for word in ("0", "1"):
            os.environ[PARTITION_VARIABLE] = word
            with torch.no_grad():
                gpt(config(**overrides))(tokens()[:, :-1], None, None)
        os.environ[PARTITION_VARIABLE] = str(rank)
    try:
        model = gpt(config(**overrides))
    except ValueError as error:
        return "building", [str(error)]
    said = []
    with taken_selections() as taken, torch.no_grad():
        for _ in range(2):
            try:
                model(tokens()[:, :-1], None, None)
            except ValueError as error:
                said.append(str(error))
    if said:
        assert not taken
        return "forward", said
    return "ran", []


WORD = {PARTITION_VARIABLE: "sideways"}
DIFFERENT: list[tuple[str, list[dict[str, str | None]], list[str]]] = [
    ("word on one rank", [ON, WORD], [f"rank 1: {PARTITION_VARIABLE} is 'sideways'; accepted are unset"]),
    ("word on all ranks", [WORD, WORD], [f"rank {r}: {PARTITION_VARIABLE} is 'sideways'" for r in (0, 1)]),
    (
        "set on some ranks",
        [ON, {PARTITION_VARIABLE: None}, ON],
        [f"{PARTITION_VARIABLE} is 'contiguous' on ranks [0, 2], 'off' on ranks [1]"],
    ),
    (
        "two partitions",
        [ON, {PARTITION_VARIABLE: "zigzag"}],
        ["'contiguous' on ranks [0], 'zigzag' on ranks [1]"],
    ),
    (
        "score bytes",
        [{SCORE_BYTES_VARIABLE: "64MiB"}, {SCORE_BYTES_VARIABLE: "32MiB"}],
        [f"{SCORE_BYTES_VARIABLE} is", f"'{64 << 20}' on ranks [0]", f"'{32 << 20}' on ranks [1]"],
    ),
    ("attend bytes", [{}, {ATTEND_BYTES_VARIABLE: "1GiB"}], [f"{ATTEND_BYTES_VARIABLE} is", "on ranks [1]"]),
    ("bad bytes", [{}, {SCORE_BYTES_VARIABLE: "many"}], [f"rank 1: {SCORE_BYTES_VARIABLE} is 'many'"]),
    ("topk", [ON, ON], [f"dsa_indexer_topk is '{TOPK}' on ranks [0], '{2 * TOPK}' on ranks [1]"]),
    ("tail", [ON, ON], ["dsa_indexer_kpool_always_select_tail is", "'True' on ranks [0], 'False' on ranks [1]"]),
    ("bits", [OFF, OFF], ["backend is", "'torch, other bits' on ranks [1]"]),
    (
        "few attend bytes",
        [ON, {**ON, ATTEND_BYTES_VARIABLE: "1KiB"}],
        [f"rank 1: {ATTEND_BYTES_VARIABLE} is 1024; accepted for this geometry is ", " or more"],
    ),
    (
        "few score bytes",
        [ON, {**ON, SCORE_BYTES_VARIABLE: "1KiB"}],
        [f"rank 1: {SCORE_BYTES_VARIABLE} is 1024; accepted for this geometry is ", " or more"],
    ),
    ("tile", [OFF, OFF], ["rank 1: a score depends on its place in the tile"]),
    ("later", [OFF, OFF], [f"{PARTITION_VARIABLE} is", "'off' on ranks [0], 'contiguous' on ranks [1]"]),
]


def attempt_each(faults: list[tuple[str, list[dict[str, str | None]]]]) -> dict[str, tuple[str, list[str]]]:
    """One after the other, so that none may leave the ranks out of step."""
    found = {}
    for fault, envs in faults:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchBackend, "fingerprint", vars(TorchBackend)["fingerprint"])
            for name, value in envs[dist.get_rank()].items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            found[fault] = attempt(fault)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_disagree_all_raise_before_the_first_selection(world: int) -> None:
    faults = [(fault, envs) for fault, envs, _ in DIFFERENT if len(envs) == world]
    results = megatron_ranks(attempt_each, world, faults, tp=world, timeout=TIMEOUT_S)
    for fault, _, parts in DIFFERENT:
        told = [of_rank[fault] for of_rank in results if fault in of_rank]
        for where, said in told:
            assert where == "forward", fault
            assert len(said) == 2, fault
            for message in said:
                assert all(part in message for part in parts), message
        assert len({message for _, said in told for message in said}) == (fault in results[0])


def test_an_unknown_word_raises_while_building_in_a_group_of_one() -> None:
    one, other = megatron_ranks(attempt, 2, "", tp=1, env=[ON, WORD], timeout=TIMEOUT_S)
    assert one == ("ran", [])
    where, (message,) = other
    assert where == "building"
    for part in (PARTITION_VARIABLE, "sideways", "accepted are unset"):
        assert part in message


def test_spellings_of_one_value_and_other_groups_do_not_matter() -> None:
    words = ("on", " Contiguous ", "off", None)
    spelt = [{PARTITION_VARIABLE: word} for word in words]
    assert megatron_ranks(attempt, 4, "", tp=2, env=spelt, timeout=TIMEOUT_S) == [("ran", [])] * 4
