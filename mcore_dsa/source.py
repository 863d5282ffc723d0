"""Where a selection comes from: one protocol, own rows only; the gather over the group stands outside, in one place.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mcore_dsa.backends import Backend, SelectionCounters
from mcore_dsa.collectives import Group, exchange_rows, gather_rows
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.ranges import named
from mcore_dsa.selection_gather import SelectionGather
from mcore_dsa.sharded import select_own_rows
from mcore_dsa.watch import Digests


class Projections(NamedTuple):
    """What an indexer makes of the rows a rank holds.

    Attributes:
        q_LBHD, weights_LBH: queries, and head weights times `heads**-0.5 * dim**-0.5`.
        key_LBD, gate_LBD: normalised keys before pooling, and their compression gates.
        ape_JD: learned offset of each place in a pool.
    """

    q_LBHD: Tensor
    weights_LBH: Tensor
    key_LBD: Tensor
    gate_LBD: Tensor
    ape_JD: Tensor


@dataclass(frozen=True, eq=False)
class SelectionRequest:
    """One layer's question in one forward.

    Attributes:
        layer: Megatron's number of the layer.
        plan: of this micro-batch, shared by all layers.
        budget: pools a row may select.
        project: runs the indexer's projections; a source that need not score never calls it.
        gather: collects what the source finds, over the group; a source may `advance` it while it works. None where
            every rank takes its own rows alone.
        digests: takes what every rank comes to by itself and must come to alike, in forwards that compare it.
    """

    layer: int
    plan: SelectionPlan
    budget: int
    project: Callable[[], Projections]
    gather: SelectionGather | None
    digests: Digests | None = None


class SelectionSource(Protocol):
    """Gives this rank's own rows of a request; every rank of the group asks its source at the same time."""

    @property
    def identity(self) -> str:
        """Equal on two ranks if and only if they enter the same collectives and come to the same selections."""

    def own_rows(self, request: SelectionRequest) -> Tensor:
        """int32 `[b, own rows, budget]`, as `select_pools` of the rows of `request.plan.own`.

        Backward and recomputes keep the tensor: nobody may write into it any more.
        """


@dataclass(frozen=True, kw_only=True, eq=False)
class Scored:
    """The source that scores: keys and gates gathered, rows exchanged, pools scored, the best taken.

    Attributes:
        backend: what compresses, scores and takes.
        group: the query-shard group.
        context_group: ranks that hold other keys of the sequence, under context parallelism.
        score_bytes: bytes of scores and scratch in flight at most.
        use_relu: whether scores are sums of rectified products.
        counters: where to add up what was done.
    """

    backend: Backend
    group: Group
    context_group: Group
    score_bytes: int
    use_relu: bool
    counters: SelectionCounters

    @property
    def identity(self) -> str:
        return "scored"

    @torch.no_grad()
    def own_rows(self, request: SelectionRequest) -> Tensor:
        plan = request.plan
        q_LBHD, weights_LBH, key_LBD, gate_LBD, ape_JD = request.project()
        keys_TBX = self.gathered(torch.cat([key_LBD, gate_LBD], dim=-1), plan)
        key_TBD, gate_TBD = keys_TBX.chunk(2, dim=-1)
        del key_LBD, gate_LBD
        q_OBHD, weights_OBH = exchange_rows([q_LBHD, weights_LBH], plan.partition, self.group, agreed=True)
        del q_LBHD, weights_LBH
        try:
            with named("compression"):
                pool_key_PBD = self.backend.compress(key_TBD, gate_TBD, ape_JD, plan.layout)
        except BaseException:
            if request.gather is not None:
                request.gather.leave()
            raise
        if request.digests is not None:
            request.digests.add("keys", keys_TBX, of="tokens")
            request.digests.add("pool keys", pool_key_PBD, of="pools")
        del keys_TBX
        return select_own_rows(
            self.backend,
            q_OBHD,
            weights_OBH,
            pool_key_PBD,
            plan,
            budget=request.budget,
            score_bytes=self.score_bytes,
            use_relu=self.use_relu,
            counters=self.counters,
            gather=request.gather,
        )

    def gathered(self, keys_LBX: Tensor, plan: SelectionPlan) -> Tensor:
        """`[t, b, x]`, what each rank holds of its own rows, of every token in token order."""
        keys_TBX = gather_rows(keys_LBX, self.group, agreed=True)
        if plan.key_order_T is None:
            return keys_TBX
        return gather_rows(keys_TBX, self.context_group, agreed=True).index_select(0, plan.key_order_T)
