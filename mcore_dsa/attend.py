"""Attention as one differentiable call: what both passes keep, gather anew and exchange; the arithmetic is a backend's.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_dsa.backends import AttentionCall, Backend
from mcore_dsa.collectives import Group
from mcore_dsa.head_exchange import HeadExchange
from mcore_dsa.kpool import RowBounds, raise_if_unseen
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.ranges import ranged


@dataclass(frozen=True, eq=False)
class Kept:
    """What backward keeps of a selection, and how it gets the whole back.

    Attributes:
        selection_BOK: int32, this rank's own rows.
        restore: from them the selection of every row, bit for bit; all ranks of the group enter it together.
    """

    selection_BOK: Tensor
    restore: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LatentShards:
    """Latents of which each rank holds some: backward keeps this rank's own, and gets the others anew.

    Attributes:
        gather: from the own latents `[l, b, c]` those of all tokens `[t, b, c]`, bit for bit each time.
        reduce: from this rank's part of the gradient of all, `[t, b, c]`, the sum over ranks for its own latents.

    All ranks of the group enter both together.
    """

    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class RowCut:
    """Attention cut by rows: each rank attends those of its own shard, with the heads of all ranks.

    Attributes:
        exchange: brings queries to the ranks of their rows, and outputs back.
        pieces: the bounds of the exchange's pieces of this rank's rows.
    """

    exchange: HeadExchange
    pieces: tuple[RowBounds, ...]

    @classmethod
    def of(cls, plan: SelectionPlan, q_SBHC: Tensor, group: Group, attend_bytes: int) -> RowCut:
        """The cut of a plan's rows, `plan.attended`, for queries of `q_SBHC`'s shape, this rank's heads.

        Its exchange holds no more than `attend_bytes`, beside the `attend_bytes` of attention itself.
        """
        exchange = HeadExchange.within(attend_bytes, q_SBHC, plan.attended, group)
        return cls(exchange, plan.attended_pieces(exchange.piece_rows))


@ranged("attention")
def attend(
    q_SBHC: Tensor,
    kv_LBC: Tensor,
    selection_BSK: Tensor,
    call: AttentionCall,
    *,
    backend: Backend,
    kept: Kept | None = None,
    shards: LatentShards | None = None,
    cut: RowCut | None = None,
) -> Tensor:
    """`mcore_dsa.sparse_attention` for arguments that fit, of rows that are located.

    Args:
        kv_LBC: the latents of all tokens; with `shards` this rank's own. Those of all are held while a pass runs,
            beyond `attend_bytes`.
        selection_BSK, call: of every row; with `cut` of this rank's own rows, `q_SBHC` of every row in either case.
        kept: what backward holds in place of `selection_BSK`.
        cut: a rank's part of the gradient of the latents is then that of its rows. All ranks of its group enter both
            passes together, and in forward raise together for a selection with faults and for what one of them raises;
            of a rank that raises in backward the others get NaN in its rows.

    Raises: ValueError for a selection with faults, and what `backend` refuses.
    """
    kept = Kept(selection_BSK, lambda selection: selection) if kept is None else kept
    shards = LatentShards(lambda kv: kv, lambda grad: grad) if shards is None else shards
    out_SBHC: Tensor = _Attend.apply(  # type: ignore[no-untyped-call]
        q_SBHC, kv_LBC, selection_BSK, kept.selection_BOK, _Passes(call, backend, kept.restore, shards, cut)
    )
    return out_SBHC


@dataclass(frozen=True, eq=False)
class _Passes:
    """What both passes know beside the tensors that autograd saves."""

    call: AttentionCall
    backend: Backend
    restore: Callable[[Tensor], Tensor]
    shards: LatentShards
    cut: RowCut | None

    def each_piece(self, x: list[Tensor], selection_BSK: Tensor, work: _Work, out_SBHC: Tensor | None) -> None:
        """Run `work` on all rows at once, or on this rank's own in the pieces of their exchange."""
        if self.cut is None:
            work(0, x, selection_BSK, self.call, out_SBHC)
            return
        exchange, pieces = self.cut.exchange, self.cut.pieces

        def of_piece(piece: int, x: list[Tensor], out: Tensor | None) -> None:
            work(piece, x, selection_BSK[:, exchange.own(piece)], replace(self.call, bounds=pieces[piece]), out)

        exchange.each_piece(x, of_piece, out_SBHC)

    def raise_faults(self, fault_2: Tensor, raised: Exception | None) -> None:
        """On every rank of the cut what is wrong on any; `raised` is what ended this rank's own work."""
        fault_3 = torch.cat([fault_2, fault_2.new_tensor([raised is not None])])
        unseen, disordered, left = fault_3.cpu() if self.cut is None else self.cut.exchange.on_any_rank(fault_3)
        if raised is not None:
            raise raised
        if bool(left):
            raise ValueError(
                "a rank of the query-shard group raised in the middle of a call; accepted is a call that every rank "
                "ends: its own error says why"
            )
        raise_if_unseen(unseen)
        if bool(disordered):
            raise ValueError("selection_BSK repeats or disorders pool ids; accepted are ascending ids, -1 behind them")


type _Work = Callable[[int, list[Tensor], Tensor, AttentionCall, Tensor | None], None]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHC: Tensor, kv_LBC: Tensor, selection_BSK: Tensor, kept_BOK: Tensor, passes: _Passes
    ) -> Tensor:
        kv_TBC = passes.shards.gather(kv_LBC)
        out_SBHC = q_SBHC.new_empty(q_SBHC.shape)
        fault_2 = passes.backend.selection_faults(selection_BSK, passes.call)
        saved: list[tuple[Tensor, ...]] = []

        def work(_: int, x: list[Tensor], selection: Tensor, call: AttentionCall, out: Tensor | None) -> None:
            assert out is not None
            saved.append(passes.backend.attend(x[0], kv_TBC, selection, call, out))

        raised = None
        try:
            passes.each_piece([q_SBHC], selection_BSK, work, out_SBHC)
        except Exception as error:
            raised = error
        passes.raise_faults(fault_2, raised)
        bounds = passes.call.bounds
        # Backward looks the tokens up once more, in `ctx.passes`. Saved, these tensors go by their versions: one that
        # is written in place between the passes is an error then and not a wrong gradient.
        located = (
            passes.call.layout.pool_token_BP,
            bounds.position_S,
            bounds.first_BS,
            bounds.visible_BS,
            bounds.tail_BS,
        )
        ctx.save_for_backward(q_SBHC, kv_LBC, kept_BOK, *located, *(x for of_piece in saved for x in of_piece))
        ctx.passes, ctx.saved_of_a_piece = passes, len(saved[0]) if saved else 0
        return out_SBHC

    @staticmethod
    @once_differentiable
    @ranged("attention")
    def backward(ctx: Any, out_grad_SBHC: Tensor) -> tuple[Tensor | None, ...]:
        passes: _Passes = ctx.passes
        q_SBHC, kv_LBC, kept_BOK, *rest = ctx.saved_tensors
        count, saved = ctx.saved_of_a_piece, rest[5:]
        kv_TBC = passes.shards.gather(kv_LBC)
        tokens, batch, channels = kv_TBC.shape
        q_grad_SBHC = q_SBHC.new_empty(q_SBHC.shape) if ctx.needs_input_grad[0] else None
        sum_XC = None
        if ctx.needs_input_grad[1]:
            dtype = torch.promote_types(torch.promote_types(q_SBHC.dtype, kv_TBC.dtype), torch.float32)
            sum_XC = kv_TBC.new_zeros(tokens * batch + 1, channels, dtype=dtype)

        def work(piece: int, x: list[Tensor], selection: Tensor, call: AttentionCall, out: Tensor | None) -> None:
            of_piece = tuple(saved[piece * count : (piece + 1) * count])
            passes.backend.attend_backward(x[0], kv_TBC, selection, call, of_piece, x[1], out, sum_XC)

        passes.each_piece([q_SBHC, out_grad_SBHC], passes.restore(kept_BOK), work, q_grad_SBHC)
        if sum_XC is None:
            return q_grad_SBHC, None, None, None, None
        kv_grad_TBC = sum_XC[:-1].unflatten(0, (tokens, batch)).to(kv_TBC.dtype)
        return q_grad_SBHC, passes.shards.reduce(kv_grad_TBC), None, None, None
