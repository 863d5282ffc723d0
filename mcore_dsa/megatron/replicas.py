"""Whether ranks that hold the same weights still hold the same bits: what no selection and no loss tells.

Megatron keeps replicas equal by giving them equal gradients, and a distributed optimizer by giving all ranks the
weights of the rank that owns them. One that came apart, by a bit that flipped, a file that was another one or a write
on one rank only, reaches every gradient of a step; where no update goes over it, in frozen weights and over tensor
parallelism, it trains on beside the others, and a checkpoint holds whichever was written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from mcore_dsa.agreement import differences
from mcore_dsa.checks import form_of
from mcore_dsa.collectives import gather_rows, greatest
from mcore_dsa.watch import whole_digest

# Weights that a message names.
_NAMED = 8


@torch.no_grad()
def check_replicas(chunks: Sequence[nn.Module], pg_collection: ProcessGroupCollection | None = None) -> None:
    """Compare parameters with those of the ranks that hold them too, by digests of their bits.

    A parameter is the same over data and context parallelism, and over tensor parallelism unless it is cut there
    (Megatron's `tensor_model_parallel`); one of an expert over the expert's data-parallel ranks. One reduction of 16
    bytes a parameter over each of these groups, and a small one before it; every rank of the world has to call this,
    best between backward and the update. Not compared: buffers, an optimizer's own weights, embeddings that pipeline
    stages share.

    Args:
        chunks: this rank's model chunks.
        pg_collection: with `dp_cp`, `tp` and, of experts, `expt_dp`; Megatron's global groups by default.

    Raises: ValueError on every rank of the world where replicas differ on any, naming weights and ranks.
    """
    groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
    named = [
        (f"chunk {index}, {name}" if len(chunks) > 1 else name, parameter)
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    ]
    dense = [(name, parameter) for name, parameter in named if getattr(parameter, "allreduce", True)]
    experts = [(name, parameter) for name, parameter in named if not getattr(parameter, "allreduce", True)]
    whole = [(name, parameter) for name, parameter in dense if not getattr(parameter, "tensor_model_parallel", False)]
    problems = [*_differing(dense, groups.dp_cp), *_differing(whole, groups.tp)]
    if experts:
        problems += _differing(experts, groups.expt_dp)
    device = named[0][1].device if named else torch.device("cpu")
    (any_differs,) = greatest([bool(problems)], [cast(dist.ProcessGroup, dist.group.WORLD)], device)
    if any_differs:
        of_ranks: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(of_ranks, problems)
        told = list(dict.fromkeys(problem for of_rank in of_ranks for problem in of_rank))
        more = f"; and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        raise ValueError(f"drift between replicas of weights: {'; '.join(told[:_NAMED])}{more}")


def _differing(named: Sequence[tuple[str, Tensor]], group: dist.ProcessGroup) -> list[str]:
    """How the ranks of `group` differ in these, which all of them hold whole."""
    if not named or group.size() == 1:
        return []
    text = "; ".join(f"{name} {form_of(tensor)}" for name, tensor in named)
    number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest())
    most, least = greatest([number, -number], [group], named[0][1].device)
    ranks = dist.get_process_group_ranks(group)
    if most != -least:
        return [f"ranks {ranks} hold weights of other names, shapes or dtypes; accepted are those of one model"]
    digest_X = torch.cat([whole_digest(tensor) for _, tensor in named])
    # The complement's greatest is the complement of the smallest.
    most_2X = torch.cat([digest_X, ~digest_X])
    dist.all_reduce(most_2X, dist.ReduceOp.MAX, group=group)
    greatest_X, complement_X = most_2X.chunk(2)
    differing = (greatest_X != ~complement_X).nonzero().flatten()
    if not len(differing):
        return []
    of_ranks = gather_rows(digest_X[differing].unsqueeze(0), group, agreed=True).T.tolist()
    return [
        sentence
        for index, digests in zip(differing.tolist(), of_ranks, strict=True)
        for sentence in differences(named[index][0], [f"{digest % 2**64:016x}" for digest in digests], ranks)
    ]
