"""Selections taken from a record in place of scoring, and records made of what a forward selects.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.checks import kind_of
from mcore_dsa.collectives import Group, gather_rows, group_rank, group_size
from mcore_dsa.kpool import RowBounds
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.record import SelectionRecord, documents_of, shortened
from mcore_dsa.selection_gather import gather_selection
from mcore_dsa.source import SelectionRequest, SelectionSource
from mcore_dsa.verified import Verified, brought, named_rows, out_of_range

# What becomes of rows that see pools and have no record.
Missing = Literal["refuse", "score", "leave_out"]


def recomputing() -> bool:
    """Whether this thread is inside a backward pass, where a forward runs only to be recomputed.

    torch has no public word for it; this one was right under Megatron's checkpoint, and both of torch's.
    """
    return torch._C._current_graph_task_id() != -1


class _Place(NamedTuple):
    """Where the own rows of a plan stand in a record: rows on the host, -1 for none; the rest on the plan's device."""

    row_BO: Tensor
    first_BO1: Tensor
    scored_BO1: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """A record as the layers of a model take their selections from it.

    Documents are told by their lengths: a plan may pad, pack and shard them in another way than the record.

    Attributes:
        record: the selections of the micro-batch.
        missing: what becomes of rows that see pools and have no record. `refuse` raises. `score` scores them.
            `leave_out` scores those alone which a recorded row of their document stands behind, and would read what
            they make; the others select nothing. None of them belongs in the loss: `record.recorded_T` tells the rows
            that do.
        layers: how many the record has to have, one for each DSA layer of the model; None for any.
    """

    record: SelectionRecord
    missing: Missing = "refuse"
    layers: int | None = None
    _places: weakref.WeakKeyDictionary[SelectionPlan, _Place] = field(
        default_factory=weakref.WeakKeyDictionary, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.record, SelectionRecord):
            raise TypeError(f"record is {kind_of(self.record)}; accepted is a SelectionRecord")
        if self.missing not in get_args(Missing):
            raise ValueError(f"missing is {self.missing!r}; accepted are {', '.join(map(repr, get_args(Missing)))}")

    @cached_property
    def scored_T(self) -> Tensor:
        """bool, rows of the record that have to be scored."""
        record = self.record
        if self.missing == "score":
            return record.missing_T
        row_X = (record.recorded_T & (record.visible_T > 0)).nonzero().flatten()
        last_N = torch.full((len(record.lengths),), -1, device="cpu").scatter_reduce(
            0, record.document_T[row_X], row_X, "amax"
        )
        return record.missing_T & (torch.arange(len(record.missing_T), device="cpu") < last_N[record.document_T])

    @cached_property
    def scores(self) -> bool:
        """Whether a layer has to score: of the whole record, for every rank has to enter what scoring exchanges."""
        return bool(self.scored_T.any())

    @cached_property
    def fault(self) -> str:
        """Why nothing can be replayed from the record, or nothing."""
        if self.layers is not None and self.record.layers != self.layers:
            return f"the record has {self.record.layers} layers; accepted are the model's, {self.layers}"
        if not self.record.fault and self.missing == "refuse" and bool(self.record.missing_T.any()):
            row = int(self.record.missing_T.nonzero()[0])
            return f"missing is 'refuse' and row {row} has no record; accepted are 'score' and 'leave_out'"
        return self.record.fault

    @cached_property
    def identity(self) -> str:
        """As `SelectionSource.identity`. A fault is part of it: ranks of which one has a bad file are told of it."""
        return f"replayed {self.record.digest}, rows without a record: {self.missing}{self.fault and f', {self.fault}'}"

    def place(self, plan: SelectionPlan) -> _Place:
        """Where a plan's own rows stand, found once for all layers.

        Raises: ValueError for a plan of other documents or pools.
        """
        if plan not in self._places:
            self._places[plan] = self.placed(plan, plan.own)
        return self._places[plan]

    def taken(self, layer: int, place: _Place, plan: SelectionPlan) -> Tensor:
        """int32 `[b, o, budget]`, what the record has of these rows, on the plan's device."""
        chosen_TK = self.record.selection_xTK[layer]
        chosen_BOK = chosen_TK.new_full((*place.row_BO.shape, self.record.budget), -1)
        chosen_BOK[place.row_BO >= 0] = chosen_TK[place.row_BO[place.row_BO >= 0]]
        chosen_BOK = chosen_BOK.to(plan.layout.device)
        return torch.where(chosen_BOK >= 0, chosen_BOK + place.first_BO1, -1)

    def placed(self, plan: SelectionPlan, own: RowBounds) -> _Place:
        """Where some rows of a plan stand.

        Raises: as `place`.
        """
        record, layout = self.record, plan.layout
        lengths = [length for length in documents_of(layout)[0] if length]
        recorded = [length for length in record.lengths if length]
        if (lengths, layout.pool_size) != (recorded, record.pool_size):
            raise ValueError(
                f"the documents have lengths {shortened(lengths)} and pools of {layout.pool_size}; accepted for this "
                f"record are {shortened(recorded)} and {record.pool_size}"
            )
        start_BN, end_BN = layout.segment_start_BN.cpu(), layout.segment_end_BN.cpu()
        shift_BN = torch.zeros_like(start_BN)
        shift_BN[end_BN > start_BN] = (
            torch.tensor(
                [start for start, length in zip(record.starts, record.lengths, strict=True) if length],
                dtype=torch.long,
                device="cpu",
            )
            - start_BN[end_BN > start_BN]
        )
        position_BO = own.position_S.cpu().expand(layout.batch, -1).contiguous()
        segment = (torch.searchsorted(start_BN, position_BO, right=True) - 1).clamp(min=0)
        inside = (position_BO >= start_BN.gather(1, segment)) & (position_BO < end_BN.gather(1, segment))
        row_BO = torch.where(inside, position_BO + shift_BN.gather(1, segment), -1)
        scored_BO = torch.zeros_like(inside)
        scored_BO[inside] = self.scored_T[row_BO[inside]]
        return _Place(row_BO, own.first_BS.int().unsqueeze(-1), scored_BO.unsqueeze(-1).to(layout.device))


@dataclass(frozen=True, kw_only=True, eq=False)
class Replayed:
    """The source that takes one layer's selections from a record, and runs no projection for them.

    Attributes:
        replay: what is replayed, shared by the layers of a model.
        layer: place of the layer among the model's DSA layers.
        fallback: scores rows without a record. It scores all rows when it has to score one.
    """

    replay: Replay
    layer: int
    fallback: SelectionSource

    @property
    def identity(self) -> str:
        return self.replay.identity

    @torch.no_grad()
    def own_rows(self, request: SelectionRequest) -> Tensor:
        replay, plan, record = self.replay, request.plan, self.replay.record
        if replay.fault:
            raise ValueError(replay.fault)
        if self.layer >= record.layers or request.budget != record.budget:
            raise ValueError(
                f"the record has {record.layers} layers and budget {record.budget}; accepted for layer {self.layer} "
                f"are more layers and budget {request.budget}"
            )
        place = replay.place(plan)
        selection_BOK = replay.taken(self.layer, place, plan)
        if not replay.scores:
            return selection_BOK
        # Of what is scored not every row is taken: the gather must not hear of it.
        return torch.where(place.scored_BO1, self.fallback.own_rows(replace(request, gather=None)), selection_BOK)


@dataclass(frozen=True, eq=False)
class VerifiedReplay:
    """The source that replays, every id being checked and some rows compared with another rank's record.

    Attributes:
        replayed: what gives the selections.
        verified: the source that verifies what is scored, which says how many rows, over which groups.
    """

    replayed: Replayed
    verified: Verified

    @property
    def identity(self) -> str:
        return f"{self.replayed.identity}, {self.verified.rows} rows verified"

    @torch.no_grad()
    def own_rows(self, request: SelectionRequest) -> Tensor:
        """As `Replayed.own_rows`.

        Raises: ValueError on every rank, naming rank and rows of ids that the row does not see, and of those that are
            others in the record of the next rank; and what a rank raises while it compares them.
        """
        plan, scored, told = request.plan, self.verified.scored, self.verified.told(request)
        own_BOK = self.replayed.own_rows(request)
        with told() as faults:
            faults += out_of_range(own_BOK, plan, fewer=True)
        rows, owners, places = self.verified.sample(plan)
        if rows:
            with told() as faults:
                theirs_RBK = brought(own_BOK.transpose(0, 1), places, owners, scored.group)
                faults += self._elsewhere(theirs_RBK, rows, owners, plan)
        return own_BOK

    def _elsewhere(self, theirs_RBK: Tensor, rows: list[int], owners: list[int], plan: SelectionPlan) -> list[str]:
        """Where the rank before this one has other ids than this rank's record, but in rows that are scored."""
        scored, replay = self.verified.scored, self.replayed.replay
        ranks, rank = group_size(scored.group), group_rank(scored.group)
        mine = [index for index, owner in enumerate(owners) if (owner + 1) % ranks == rank]
        if not mine:
            return []
        theirs_BRK, rows = theirs_RBK[mine].transpose(0, 1), [rows[index] for index in mine]
        place = replay.placed(plan, plan.bounds.take(torch.tensor(rows, device=theirs_RBK.device)))
        mine_BRK = replay.taken(self.replayed.layer, place, plan)
        differs_BR = (mine_BRK != theirs_BRK).any(-1) & ~place.scored_BO1.squeeze(-1)
        scored.counters.verified_rows += differs_BR.numel()
        first = group_rank(scored.context_group) * ranks
        what = f"rank {first + (rank - 1) % ranks} replays something else than the record of rank {first + rank}"
        return named_rows(differs_BR, rows, what, "equal records")


class Recorder:
    """Keeps what the layers of a model select, forward after forward, and joins it over the ranks.

    A forward counts as one micro-batch, a recompute of it does not count. Every rank of the groups records.

    Args:
        layers: DSA layers of the whole model.
        tp_group, cp_group, pp_group: over which rows, chunks of the sequence and layers are spread.
        device: where the groups exchange.
    """

    def __init__(self, layers: int, *, tp_group: Group, cp_group: Group, pp_group: Group, device: torch.device) -> None:
        self._layers, self._device = layers, device
        self._tp_group, self._cp_group, self._pp_group = tp_group, cp_group, pp_group
        self._taken: dict[int, list[tuple[SelectionPlan, Tensor]]] = {}

    def around(self, source: SelectionSource, layer: int) -> SelectionSource:
        """`source`, what it gives being kept as the selections of one of the layers."""
        return _Recorded(source, self._taken.setdefault(layer, []))

    def finish(self) -> list[SelectionRecord]:
        """One record for each forward, of all layers and in token order, on every rank; all ranks have to ask.

        Raises: ValueError where layers ran another number of forwards, or a layer is on no rank or on several.
        """
        told = self._of_stages({layer: len(taken) for layer, taken in self._taken.items()})
        stage_of = {layer: stage for stage, counts in enumerate(told) for layer in counts}
        numbers = {number for counts in told for number in counts.values()}
        if sorted(layer for counts in told for layer in counts) != list(range(self._layers)) or len(numbers) > 1:
            raise ValueError(
                f"the forwards of the layers of each stage are {told}; accepted is one number for {self._layers} layers"
            )
        forwards = numbers.pop() if numbers else 0
        return [self._joined(forward, stage_of) for forward in range(forwards)]

    def _joined(self, forward: int, stage_of: dict[int, int]) -> SelectionRecord:
        plans = [taken[forward][0] for taken in self._taken.values()]
        mine = (*documents_of(plans[0].layout), plans[0].layout.pool_size, self._budget()) if plans else None
        lengths, padded, pool_size, budget = next(said for said in self._of_stages(mine) if said is not None)
        selection_xTK = torch.empty(self._layers, sum(padded), budget, dtype=torch.int32, device="cpu")
        for layer, stage in sorted(stage_of.items()):
            if stage == group_rank(self._pp_group):
                whole_TK = self._whole(*self._taken[layer][forward])
            else:
                whole_TK = selection_xTK.new_empty(selection_xTK.shape[1:], device=self._device)
            if self._pp_group is not None:
                dist.broadcast(whole_TK, group=self._pp_group, group_src=stage)
            selection_xTK[layer] = whole_TK
        return SelectionRecord(
            selection_xTK=selection_xTK,
            recorded_T=torch.ones(sum(padded), dtype=torch.bool, device="cpu"),
            lengths=lengths,
            padded_lengths=padded,
            pool_size=pool_size,
        )

    def _budget(self) -> int:
        return next(taken[0][1].shape[-1] for taken in self._taken.values())

    def _whole(self, plan: SelectionPlan, own_BOK: Tensor) -> Tensor:
        """int32 `[all tokens, budget]`, relative to the documents, of this rank's rows of one layer and forward."""
        selection_BSK = gather_selection(own_BOK.to(self._device), plan.partition, self._tp_group, agreed=True)
        layout = plan.layout
        selection_TBK = gather_rows(selection_BSK.transpose(0, 1), self._cp_group, agreed=True)
        if plan.key_order_T is not None:
            selection_TBK = selection_TBK[plan.key_order_T]
        first_BT = layout.bounds(torch.arange(layout.num_tokens, device=layout.device)).first_BS.int()
        relative_BTK = selection_TBK.transpose(0, 1) - first_BT.unsqueeze(-1)
        return relative_BTK.masked_fill_(selection_TBK.transpose(0, 1) < 0, -1).flatten(0, 1)

    def _of_stages(self, value: Any) -> list[Any]:
        """What every stage of the pipeline says, in their order."""
        told = [value] * group_size(self._pp_group)
        if self._pp_group is not None:
            dist.all_gather_object(told, value, group=self._pp_group)
        return told


@dataclass(frozen=True, eq=False)
class _Recorded:
    """A source whose selections are kept on the host; they are as many as the device's memory is short of."""

    source: SelectionSource
    taken: list[tuple[SelectionPlan, Tensor]]

    @property
    def identity(self) -> str:
        return f"recorded, {self.source.identity}"

    def own_rows(self, request: SelectionRequest) -> Tensor:
        own_BOK = self.source.own_rows(request)
        if not recomputing():
            self.taken.append((request.plan, own_BOK.to("cpu", copy=True)))
        return own_BOK
