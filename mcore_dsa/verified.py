"""Verification: sampled rows are selected again on another rank, and judged by the oracle.

Letters of shapes: `mcore_dsa/__init__.py`; here R are the sampled rows.

Nothing that is compared has come the way of what it is compared with: keys are gathered once more, queries come from
the ranks that projected them and not from those that own the row, and another rank selects. What that rank finds has to
be the same, bit for bit. That a backend is wrong in the same way everywhere, only the oracle can see: no pool that was
left out may score higher, in float64, than one that was taken, beyond what fp32 rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_dsa.agreement import told_to_all
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.collectives import Group, gather_rows, group_rank, group_size
from mcore_dsa.kpool import PoolLayout, RowBounds
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.reference import reference_scores
from mcore_dsa.source import Projections, Scored, SelectionRequest

# Rows that a message names, and rows that are looked at together.
_NAMED = 4
_ROWS = 1024


@dataclass(eq=False)
class Verified:
    """The source that scores, of whose forwards some rows are selected twice.

    Attributes:
        scored: what gives the selections; what it counts as verified are the rows of samples that this rank selected
            again.
        rows: how many each forward verifies, of all ranks together.
    """

    scored: Scored
    rows: int
    _calls: int = field(default=0, init=False)

    @property
    def identity(self) -> str:
        return f"{self.scored.identity}, {self.rows} rows verified"

    @torch.no_grad()
    def own_rows(self, request: SelectionRequest) -> Tensor:
        """As `Scored.own_rows`, gathered when all of it is done.

        Raises: ValueError on every rank, naming layer, tensor, rank and rows of what is not finite, not a pool that its
            row sees, or not what another rank finds; and what a rank raises meanwhile.
        """
        told = self.told(request)
        with told() as faults:
            projections = request.project()
            faults += _not_finite(projections, request.plan, group_rank(self.scored.group))
        with told() as faults:
            # Ranks tell their gather at other times: no collective may come between.
            own_BOK = self.scored.own_rows(replace(request, gather=None, project=lambda: projections))
            faults += out_of_range(own_BOK, request.plan)
        if request.plan.bounds.rows:
            with told() as faults:
                faults += self._again(projections, own_BOK, request)
        return own_BOK

    def told(self, request: SelectionRequest) -> Callable[[], AbstractContextManager[list[str]]]:
        """`told_to_all` of all ranks that meet in a request."""
        groups = [group for group in (self.scored.group, self.scored.context_group) if group is not None]
        return partial(told_to_all, f"selections in layer {request.layer}", *groups)

    def sample(self, plan: SelectionPlan) -> tuple[list[int], list[int], list[int]]:
        """Rows to verify, the same on all ranks: of each the rank that owns it, and where it has it among its own.

        Where every rank owns every row, each rank owns some.
        """
        self._calls += 1
        rows = random.Random(self._calls).sample(range(plan.bounds.rows), min(self.rows, plan.bounds.rows))
        partition, ranks = plan.partition, plan.partition.group_size
        if partition.is_replicated:
            return rows, [row % ranks for row in rows], rows
        place_of: dict[int, tuple[int, int]] = {}
        for rank in range(ranks):
            first = 0
            for part in partition.slices(rank):
                place_of |= {row: (rank, first + row - part.start) for row in rows if row in part}
                first += len(part)
        return rows, [place_of[row][0] for row in rows], [place_of[row][1] for row in rows]

    def _again(self, projections: Projections, own_BOK: Tensor, request: SelectionRequest) -> list[str]:
        """Select the sampled rows of the rank before this one once more; where that differs."""
        plan, scored = request.plan, self.scored
        ranks, rank, held = group_size(scored.group), group_rank(scored.group), len(projections.q_LBHD)
        rows, owners, places = self.sample(plan)
        homes, at_home = [row // held for row in rows], [row % held for row in rows]
        q_RBHD = brought(projections.q_LBHD, at_home, homes, scored.group)
        weights_RBH = brought(projections.weights_LBH, at_home, homes, scored.group)
        theirs_RBK = brought(own_BOK.transpose(0, 1), places, owners, scored.group)
        keys_TBX = scored.gathered(torch.cat([projections.key_LBD, projections.gate_LBD], dim=-1), plan)
        mine = [index for index, owner in enumerate(owners) if (owner + 1) % ranks == rank]
        if not mine:
            return []
        key_TBD, gate_TBD = keys_TBX.chunk(2, dim=-1)
        pool_key_PBD = scored.backend.compress(key_TBD, gate_TBD, projections.ape_JD, plan.layout)
        rows = [rows[index] for index in mine]
        bounds = plan.bounds.take(torch.tensor(rows, device=own_BOK.device))
        queries = q_RBHD[mine], weights_RBH[mine], pool_key_PBD
        theirs_BRK = theirs_RBK[mine].transpose(0, 1)
        options: dict[str, Any] = {
            "budget": request.budget,
            "score_bytes": scored.score_bytes,
            "use_relu": scored.use_relu,
        }
        again_BRK = scored.backend.select(*queries, plan.layout, bounds, counters=SelectionCounters(), **options)
        scored.counters.verified_rows += theirs_BRK[..., 0].numel()
        beaten_BR = _beaten(*queries, theirs_BRK, plan.layout, bounds, use_relu=scored.use_relu)
        first = group_rank(scored.context_group) * ranks
        owner, this = (f"rank {first + number % ranks}" for number in (rank - 1, rank))
        selects = f"{owner} selects something else than {this}"
        leaves = f"{owner} leaves out a better pool than one it takes"
        return [
            *named_rows((again_BRK != theirs_BRK).any(-1), rows, selects, "equal selections"),
            *named_rows(beaten_BR, rows, leaves, "the best of the pools"),
        ]


def brought(x_XBx: Tensor, places: Sequence[int], holders: Sequence[int], group: Group) -> Tensor:
    """`[r, ...]` on every rank: row `places[i]` of what rank `holders[i]` gives."""
    rank = group_rank(group)
    own = [place if holder == rank else 0 for place, holder in zip(places, holders, strict=True)]
    given = x_XBx[own] if len(x_XBx) else x_XBx.new_zeros(len(own), *x_XBx.shape[1:])
    of_ranks = gather_rows(given, group, agreed=True).unflatten(0, (-1, len(own)))
    of_rows: Tensor = of_ranks[list(holders), list(range(len(own)))]
    return of_rows


def _not_finite(projections: Projections, plan: SelectionPlan, rank: int) -> list[str]:
    """Of what this rank projects, padding aside, of which nothing is read."""
    held = len(projections.q_LBHD)
    own = slice(rank * held, (rank + 1) * held)
    read_BL = (plan.bounds.visible_BS + plan.bounds.tail_BS)[:, own] > 0
    names = ("queries", "head weights", "keys", "gates")
    faults = []
    for name, x_LBx in zip(names, projections, strict=False):
        finite_LB = torch.cat([part.isfinite().flatten(2).all(-1) for part in x_LBx.split(_ROWS)])
        faults += named_rows(
            ~finite_LB.T & read_BL, range(own.start, own.stop), f"NaN or infinity is among the {name}", "finite values"
        )
    return faults


def out_of_range(own_BOK: Tensor, plan: SelectionPlan, *, fewer: bool = False) -> list[str]:
    """Of all rows of this rank: ids of pools that the row sees, ascending, as many as there are, -1 behind them.

    Args:
        fewer: whether a row may have fewer than it could.
    """
    budget = own_BOK.shape[2]
    bad = [torch.zeros(len(own_BOK), 0, dtype=torch.bool, device=own_BOK.device)]
    for start in range(0, own_BOK.shape[1], _ROWS):
        part = slice(start, start + _ROWS)
        id_BRK, bounds = own_BOK[:, part], plan.own.take(part)
        rank_BRK, visible_BR1 = id_BRK - bounds.first_BS.unsqueeze(-1), bounds.visible_BS.unsqueeze(-1)
        count_BR1 = (id_BRK != -1).sum(-1, keepdim=True) if fewer else visible_BR1
        used_BRK = torch.arange(budget, device=own_BOK.device) < count_BR1
        seen_BRK = (rank_BRK >= 0) & (rank_BRK < visible_BR1)
        ascends_BRK = F.pad(id_BRK[..., 1:] > id_BRK[..., :-1], (1, 0), value=True)
        bad.append(~torch.where(used_BRK, seen_BRK & ascends_BRK, id_BRK == -1).all(-1))
    rows = [row for part in plan.partition.slices(plan.rank) for row in part]
    accepted = "ascending ids of complete pools that the row sees, "
    accepted += "-1 behind them" if fewer else "as many as it may select, -1 behind them"
    return named_rows(torch.cat(bad, dim=1), rows, "ids that cannot be are selected", accepted)


def _beaten(
    q_RBHD: Tensor,
    weights_RBH: Tensor,
    pool_key_PBD: Tensor,
    selection_BRK: Tensor,
    layout: PoolLayout,
    bounds: RowBounds,
    *,
    use_relu: bool,
) -> Tensor:
    """bool `[b, r]`, where a pool that was left out scores higher than one that was taken, by more than fp32 rounds.

    A sum of n products in fp32 is off by `n * 2**-24` of the sum of their sizes at most, whatever its order; twice that
    holds for units that cut off in place of rounding.
    """
    arguments = q_RBHD, weights_RBH, pool_key_PBD
    score_BRP = reference_scores(*arguments, dtype=torch.float64)
    if not use_relu:
        score_BRP -= reference_scores(-q_RBHD, *arguments[1:], dtype=torch.float64)
    heads, dim = q_RBHD.shape[2:]
    slack_BRP = reference_scores(*(x.abs() for x in arguments), dtype=torch.float64) * ((heads + dim + 1) * 2.0**-23)
    pools = len(pool_key_PBD)
    slot_BRK = selection_BRK.long() - layout.first_pool_id
    # Column `pools` is where everything else goes.
    taken_BRP = torch.zeros(*selection_BRK.shape[:2], pools + 1, dtype=torch.bool, device=selection_BRK.device)
    taken_BRP.scatter_(2, slot_BRK.where((slot_BRK >= 0) & (slot_BRK < pools), pools), True)
    rank_P = torch.arange(pools, device=selection_BRK.device) + layout.first_pool_id
    rank_BRP = rank_P - bounds.first_BS.unsqueeze(-1)
    left_BRP = (rank_BRP >= 0) & (rank_BRP < bounds.visible_BS.unsqueeze(-1)) & ~taken_BRP[..., :pools]
    if not pools:
        return left_BRP.any(-1)
    least_BR = (score_BRP + slack_BRP).masked_fill(~taken_BRP[..., :pools], torch.inf).amin(-1)
    most_BR = (score_BRP - slack_BRP).masked_fill(~left_BRP, -torch.inf).amax(-1)
    return most_BR > least_BR


def named_rows(bad_BR: Tensor, rows: Sequence[int], what: str, accepted: str) -> list[str]:
    """One sentence that names the first of these rows."""
    places = [(int(row), int(sample)) for row, sample in bad_BR.T.nonzero().tolist()]
    if not places:
        return []
    said = ", ".join(f"row {rows[row]} of sample {sample}" for row, sample in places[:_NAMED])
    said += f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
    return [f"{what} in {said}; accepted are {accepted}"]
