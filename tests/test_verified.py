"""Verification: what is right is counted, and whatever is wrong on one rank or on all is named on every rank."""

import functools
import os
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from models import BATCH, OFF, ROWS, attentions, config, gpt, taken_selections, tokens
from packs import Pack

from mcore_dsa import PoolLayout
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.megatron import KPoolDSAIndexer, ModelSelections
from mcore_dsa.settings import ATTEND_SHARD_VARIABLE, PARTITION_VARIABLE, VERIFY_VARIABLE
from mcore_dsa.source import Projections, Scored
from mcore_dsa.verified import _beaten

SAMPLED = 10
CUTS = (("off", "heads"), ("1", "rows"), ("zigzag", "heads"), ("balanced", "heads"), ("off", "rows"))


def right_forwards(cp: int) -> list[tuple[int, bool]]:
    """Rows that this rank verified in two forwards, with each flag, and whether selections are those without."""
    over = {"context_parallel_size": cp, "cp_comm_type": "allgather"} if cp > 1 else {}
    ids, told = tokens()[:, : ROWS // cp], []
    for flag, cut in CUTS if cp == 1 else CUTS[:3]:
        found = []
        for rows in (str(SAMPLED), "off"):
            os.environ |= {PARTITION_VARIABLE: flag, ATTEND_SHARD_VARIABLE: cut, VERIFY_VARIABLE: rows}
            torch.manual_seed(5)
            model = gpt(config(num_layers=1, **over))
            with torch.no_grad(), taken_selections() as taken:
                model(ids, None, None)
                model(ids, None, None)
            found.append((sum(layer.counters.verified_rows for layer in attentions(model)), taken))
        (verified, taken), (none, without) = found
        assert none == 0
        told.append((verified, all(torch.equal(*pair) for pair in zip(taken, without, strict=True))))
    return told


@pytest.mark.parametrize(("ranks", "cp"), [(1, 1), (3, 1), (4, 2)])
def test_rows_that_are_right_are_counted(ranks: int, cp: int) -> None:
    of_ranks = megatron_ranks(right_forwards, ranks, cp, tp=ranks // cp, cp=cp, env=OFF)
    for told in zip(*of_ranks, strict=True):
        assert sum(rows for rows, _ in told) == 2 * SAMPLED * BATCH * cp
        assert all(same for _, same in told)
    # With every row on every rank, each rank answers for some.
    assert all(told[0][0] > 0 for told in of_ranks)


def not_finite(field: str, value: float) -> None:
    original = KPoolDSAIndexer.forward

    def forward(self: KPoolDSAIndexer, *args: Any) -> Projections:
        projections = original(self, *args)
        getattr(projections, field)[3, 1] = value
        return projections

    KPoolDSAIndexer.forward = forward


def other_rows(change: Any) -> None:
    original = Scored.own_rows

    def own_rows(self: Scored, request: Any) -> torch.Tensor:
        selection = original(self, request)
        change(selection)
        return selection

    Scored.own_rows = own_rows


def last_taken_for_another(selection: torch.Tensor) -> None:
    """A pool that the last own row of sample 0 sees and did not take, in place of one it took."""
    row = selection[0, -1]
    (free,) = [pool for pool in range(12) if pool not in row.tolist()][:1]
    row[row.argmin()] = free
    row.copy_(row.sort().values)


def worst_pools() -> None:
    """Every rank takes the pools with the least scores, alike."""
    original = TorchBackend.select
    TorchBackend.select = staticmethod(lambda q, weights, *args, **options: original(q, -weights, *args, **options))


def id_out_of_range(selection: torch.Tensor) -> None:
    selection[1, -2, 3] = 10**6


def raises_in_projecting() -> None:
    KPoolDSAIndexer.forward = lambda *_: (_ for _ in ()).throw(MemoryError("no memory left"))


def raises_in_selecting(again: bool) -> None:
    """While this rank selects for itself, or for the rank before it."""
    original, calls = TorchBackend.select, iter((again, not again, True))

    def select(*args: Any, **options: Any) -> torch.Tensor:
        if next(calls):
            return original(*args, **options)
        raise MemoryError("no memory left")

    TorchBackend.select = staticmethod(select)


FAULTS: dict[str, tuple[Any, bool, str]] = {
    "no projections": (raises_in_projecting, False, r"\): rank 1: MemoryError: no memory left$"),
    "no selection": (lambda: raises_in_selecting(False), False, r"\): rank 1: MemoryError: no memory left$"),
    "no second selection": (lambda: raises_in_selecting(True), False, r"\): rank 1: MemoryError: no memory left$"),
    "a key": (
        lambda: not_finite("key_LBD", float("nan")),
        False,
        r"rank 1: NaN or infinity is among the keys in row {row} of sample 1; accepted are finite values",
    ),
    "a head weight": (
        lambda: not_finite("weights_LBH", float("inf")),
        False,
        r"rank 1: NaN or infinity is among the head weights in row {row} of sample 1; accepted are finite values",
    ),
    "an id": (
        lambda: other_rows(id_out_of_range),
        False,
        r"rank 1: ids that cannot be are selected in row {last_but_one} of sample 1; accepted are ascending ids of",
    ),
    "a selection": (
        lambda: other_rows(last_taken_for_another),
        False,
        r"rank {next}: rank 1 selects something else than rank {next} in row {last} of sample 0; accepted are equal "
        r"selections; rank {next}: rank 1 leaves out a better pool than one it takes in row {last} of sample 0",
    ),
    "every rank's": (
        worst_pools,
        True,
        r"rank 0: rank \d leaves out a better pool than one it takes in row .* and \d+ more; accepted are the best of",
    ),
}


def told_of_each() -> list[str]:
    """All faults one after the other, on rank 1 alone or on all; every row is verified."""
    before = KPoolDSAIndexer.forward, Scored.own_rows, TorchBackend.select
    told = []
    for inject, on_all, _ in FAULTS.values():
        model = gpt(config(num_layers=1))
        if on_all or dist.get_rank() == 1:
            inject()
        with torch.no_grad(), pytest.raises(ValueError, match="selections in layer 1") as raised:
            model(tokens()[:, :-1], None, None)
        KPoolDSAIndexer.forward, Scored.own_rows = before[:2]
        TorchBackend.select = staticmethod(before[2])
        told.append(str(raised.value))
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_wrong_is_named_on_every_rank(ranks: int) -> None:
    of_ranks = megatron_ranks(told_of_each, ranks, tp=ranks, env={PARTITION_VARIABLE: "1", VERIFY_VARIABLE: str(ROWS)})
    assert all(told == of_ranks[0] for told in of_ranks)
    own = ROWS // ranks
    places = {"row": own + 3, "last": 2 * own - 1, "last_but_one": 2 * own - 2, "next": 2 % ranks}
    for (_, _, said), message in zip(FAULTS.values(), of_ranks[0], strict=True):
        assert message.startswith("selections in layer 1 of the query-shard group (ranks within it): ")
        assert re.search(said.format(**places), message), message


def replayed() -> tuple[list[str], list[int]]:
    """What is told of records that are sound and that rank 1 has written to, and how many rows this rank verified."""
    model = gpt(config())
    selections, ids, told, counts = ModelSelections(model), tokens()[:, :-1], [], []
    row = 2 * ROWS // dist.get_world_size() - 2
    with torch.no_grad():
        with selections.recording() as recorder:
            model(ids, None, None)
        (record,) = recorder.finish()
        of_half_T = torch.arange(len(record.recorded_T)) % ROWS < ROWS // 2
        of_half = record.selection_xTK.masked_fill(~of_half_T.unsqueeze(-1), -1)
        half = replace(record, selection_xTK=of_half, recorded_T=of_half_T)
        cases = (record, "refuse", None), (half, "score", None), (record, "refuse", 10**6), (record, "refuse", -1)
        for each, missing, value in cases:
            # What all ranks agree on is known by now, and not asked for again.
            assert (bool(each.digest), each.fault) == (True, "")
            before = sum(layer.counters.verified_rows for layer in attentions(model))
            if value is not None and dist.get_rank() == 1:
                each.selection_xTK[1, row, -1] = value
            try:
                with selections.replaying(each, missing=missing):
                    model(ids, None, None)
                told.append("")
            except ValueError as error:
                told.append(str(error))
            counts.append(sum(layer.counters.verified_rows for layer in attentions(model)) - before)
    return told, counts


@pytest.mark.parametrize("ranks", [2, 4])
def test_replayed_selections_are_those_of_every_rank_s_record(ranks: int) -> None:
    env = {**OFF, VERIFY_VARIABLE: str(ROWS), PARTITION_VARIABLE: "1"}
    of_ranks = megatron_ranks(replayed, ranks, tp=ranks, env=env)
    assert all(told == of_ranks[0][0] for told, _ in of_ranks)
    sound, scored, strange, other = of_ranks[0][0]
    assert (sound, scored) == ("", "")
    begins, row = "selections in layer 2 of the query-shard group (ranks within it): ", 2 * ROWS // ranks - 2
    assert strange == (
        f"{begins}rank 1: ids that cannot be are selected in row {row} of sample 0; accepted are ascending ids of "
        "complete pools that the row sees, -1 behind them"
    )
    following = 2 % ranks
    assert other == (
        f"{begins}rank {following}: rank 1 replays something else than the record of rank {following} in row {row} of "
        "sample 0; accepted are equal records"
    )
    # Rows that are scored are verified as such too.
    counted = [sum(counts) for counts in zip(*(counts for _, counts in of_ranks), strict=True)]
    assert counted[:2] == [2 * ROWS * BATCH, 4 * ROWS * BATCH]


def padding_is_not_read() -> int:
    """NaN in rows behind a document's own length is nobody's business."""
    pack = Pack.of(43, 40, multiple=48)
    original = KPoolDSAIndexer.forward

    def forward(self: KPoolDSAIndexer, *args: Any) -> Projections:
        projections = original(self, *args)
        for values in (projections.q_LBHD, projections.weights_LBH, projections.key_LBD, projections.gate_LBD):
            values[45] = float("nan")
        return projections

    KPoolDSAIndexer.forward = forward
    model = gpt(config(num_layers=1))
    with torch.no_grad():
        model(pack.tokens_and_labels()[0], None, None, packed_seq_params=pack.params())
    return attentions(model)[0].counters.verified_rows


def test_padding_may_hold_anything() -> None:
    assert sum(megatron_ranks(padding_is_not_read, 2, tp=2, env={**OFF, VERIFY_VARIABLE: str(ROWS)})) == ROWS


def test_without_relu_the_oracle_sums_the_products_themselves() -> None:
    q, weights, keys = torch.randn(2, 1, 8, 4), torch.rand(2, 1, 8), torch.randn(6, 1, 4)
    layout = PoolLayout.dense(24, pool_size=4)
    bounds = layout.bounds(torch.tensor([23, 15]))
    for use_relu in (True, False):
        select = functools.partial(TorchBackend.select, q, weights, keys, layout, bounds, budget=2, score_bytes=2**28)
        right = select(use_relu=use_relu, counters=SelectionCounters())
        assert not _beaten(q, weights, keys, right, layout, bounds, use_relu=use_relu).any()
        wrong = right.clone()
        wrong[0, 0] = torch.tensor([pool for pool in range(6) if pool not in right[0, 0].tolist()][:2])
        assert _beaten(q, weights, keys, wrong, layout, bounds, use_relu=use_relu).tolist() == [[True, False]]
