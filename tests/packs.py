"""Packs of documents, whole or cut over context parallelism, and one forward and backward of a tiny model over them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from models import VOCAB, attentions, config, gpt, taken_selections
from torch import Tensor
from train_runs import whole

from mcore_dsa import PoolLayout, compress_keys
from mcore_dsa.source import Projections


@dataclass(frozen=True)
class Pack:
    """Documents of `lengths` tokens, each in a place of `padded` tokens."""

    lengths: tuple[int, ...]
    padded: tuple[int, ...]

    @classmethod
    def of(cls, *lengths: int, multiple: int = 1, behind: int = 0) -> "Pack":
        """Each document padded to a multiple, the last one by some more such multiples."""
        padded = [-(-length // multiple) * multiple for length in lengths]
        padded[-1] += behind * multiple
        return cls(lengths, tuple(padded))

    @property
    def tokens(self) -> int:
        return sum(self.padded)

    def bounds(self) -> list[tuple[int, int]]:
        """First token, and the one behind the last, of each document that has some."""
        return [(start, start + own) for start, own in zip(self.starts, self.lengths, strict=True) if own]

    @property
    def starts(self) -> list[int]:
        return list(accumulate(self.padded, initial=0))[:-1]

    @property
    def real_T(self) -> Tensor:
        """bool `[t]`, tokens that are no padding."""
        return torch.cat([torch.arange(room) < own for own, room in zip(self.lengths, self.padded, strict=True)])

    def rows(self, cp_rank: int, cp_size: int) -> Tensor:
        """int64, the tokens of a context-parallel rank in its order: chunks r and 2 * CP - 1 - r of each document."""
        starts = accumulate(self.padded, initial=0)
        chunks = [
            torch.arange(start + chunk * room // (2 * cp_size), start + (chunk + 1) * room // (2 * cp_size))
            for start, room in zip(starts, self.padded, strict=False)
            for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank)
        ]
        return torch.cat(chunks) if cp_size > 1 else torch.arange(self.tokens)

    def params(self, **changed: Any) -> PackedSeqParams:
        """As a data loader gives them: the padded lengths only where there is padding."""
        own, room = (torch.tensor([0, *accumulate(sizes)], dtype=torch.int32) for sizes in (self.lengths, self.padded))
        fields = {"cu_seqlens_q": own, "cu_seqlens_kv": own, "max_seqlen_q": max(self.padded)}
        fields |= {"max_seqlen_kv": max(self.padded), "qkv_format": "thd"}
        if self.lengths != self.padded:
            fields |= {"cu_seqlens_q_padded": room, "cu_seqlens_kv_padded": room}
        return PackedSeqParams(**{**fields, **changed})

    def tokens_and_labels(self) -> tuple[Tensor, Tensor]:
        """`[1, t]` each; what stands in the padding is of no meaning, and random."""
        ids = torch.randint(0, VOCAB, (1, self.tokens + 1), generator=torch.Generator().manual_seed(self.tokens))
        return ids[:, :-1], ids[:, 1:]


@dataclass
class Pass:
    """Sum of the losses of all tokens, whole gradients over all ranks, and what each layer's attention did.

    `rows_X` are this rank's rows among the sequence's, `losses_X` and `selections` theirs, `projections` what its
    indexers made; `recomputed` and `scored_rows` are of this rank.
    """

    loss: float
    gradients: dict[str, Tensor]
    rows_X: Tensor
    losses_X: Tensor
    selections: list[Tensor]
    projections: list[Projections]
    recomputed: list[dict[str, int]] = field(default_factory=list)
    scored_rows: list[int] = field(default_factory=list)


def forward_backward(
    model: Any, ids: Tensor, labels: Tensor, counted: Tensor, rows_X: Tensor, params: PackedSeqParams | None
) -> Pass:
    """The rows of a context-parallel rank, sums over ranks where Megatron's `finalize_model_grads` has them."""
    model.zero_grad()
    layers, projected = attentions(model), []
    hooks = [layer.indexer.register_forward_hook(lambda *call: projected.append(call[-1])) for layer in layers]
    with taken_selections() as taken:
        losses = model(ids[:, rows_X], None, None, labels=labels[:, rows_X], packed_seq_params=params)
        loss = (losses * counted[rows_X]).sum()
        forward = len(taken)
        loss.backward()
    for hook in hooks:
        hook.remove()
    cp, tp = parallel_state.get_context_parallel_group(), parallel_state.get_tensor_model_parallel_group()
    total, gradients = loss.detach().clone(), {}
    dist.all_reduce(total, group=cp)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=cp)
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(parameter.grad, group=tp)
            gradients[name] = whole(name, parameter, parameter.grad)
    return Pass(
        float(total),
        gradients,
        rows_X,
        losses.detach()[0],
        taken[:forward],
        projected[: len(layers)],
        [layer.recomputed for layer in layers],
        [layer.counters.scored_rows for layer in layers],
    )


def run_pack(
    pack: Pack, build: Any = gpt, moved: bool = False, alone: bool = False, **options: Any
) -> Pass | list[Pass]:
    """One pass over a pack on this layout.

    Args:
        moved: every weight goes up or down by one unit in its last place.
        alone: every document by itself, as a dense batch of one sample; a pass for each.
    """
    cp = parallel_state.get_context_parallel_world_size()
    over = {"context_parallel_size": cp, "cp_comm_type": "allgather" if cp > 1 else None}
    model = build(config(**over, **options))
    if moved:
        move(model)
    ids, labels = pack.tokens_and_labels()
    if not alone:
        rows_X = pack.rows(parallel_state.get_context_parallel_rank(), cp)
        return forward_backward(model, ids, labels, pack.real_T, rows_X, pack.params())
    passes = []
    for start, stop in pack.bounds():
        length, part = stop - start, slice(start, stop)
        every = torch.arange(length)
        passes.append(forward_backward(model, ids[:, part], labels[:, part], every >= 0, every, None))
    return passes


def run_dense(rows: int, build: Any = gpt, moved: bool = False, batch: int = 2, **options: Any) -> Pass:
    """One pass over a dense batch of `rows` tokens a sample, of which a rank of context parallelism has its share."""
    cp = parallel_state.get_context_parallel_world_size()
    over = {"context_parallel_size": cp, "cp_comm_type": "allgather" if cp > 1 else None}
    model = build(config(**over, **options))
    if moved:
        move(model)
    ids = torch.randint(0, VOCAB, (batch, rows + 1), generator=torch.Generator().manual_seed(rows))
    rows_X = Pack.of(rows).rows(parallel_state.get_context_parallel_rank(), cp)
    return forward_backward(model, ids[:, :-1], ids[:, 1:], torch.ones(rows), rows_X, None)


def move(model: Any) -> None:
    """Each weight by one unit in its last place, up or down: what rounding alone may do to a result."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))


# How far gradients may lie apart, in units of what `move` does to them: both are sums of the same products, each with a
# relative error of 2**-24, in another order.
ROUNDINGS = 8.0


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], moved: dict[str, Tensor], where: str) -> None:
    """Gradients equal but for rounding; `moved` are those of weights that differ in the last place."""
    assert found.keys() == wanted.keys(), where
    for name, gradient in wanted.items():
        bound = ROUNDINGS * distance(moved[name], gradient)
        # Of one token that sees itself alone nothing depends on the queries.
        assert bound > 0 or not gradient.any(), f"{where}: {name} does not depend on the weights"
        assert distance(found[name], gradient) <= bound, (
            f"{where}: {name} is {distance(found[name], gradient)} off, accepted is {bound}"
        )


def sum_of(passes: Sequence[Pass]) -> dict[str, Tensor]:
    """Gradients of the sum of several losses."""
    return {name: torch.stack([one.gradients[name] for one in passes]).sum(0) for name in passes[0].gradients}


# Of float32 scores that are a thousandth apart relative to the greatest, rounding decides nothing.
NEAR = 1e-3


def assert_same_or_near_tie(
    found_SK: Tensor, wanted_SK: Tensor, made: Projections, layout: PoolLayout, where: str
) -> int:
    """Rows whose selections differ, each of them because the pools in question score alike; `made` of all rows."""
    different = (found_SK != wanted_SK).any(1).nonzero().flatten().tolist()
    pool_key_PD = compress_keys(made.key_LBD, made.gate_LBD, made.ape_JD, layout)[:, 0].double()
    for row in different:
        products_HP = (made.q_LBHD[row, 0].double() @ pool_key_PD.T).relu()
        score_P = made.weights_LBH[row, 0].double() @ products_HP
        found, wanted = (set(selection[row].tolist()) - {-1} for selection in (found_SK, wanted_SK))
        assert len(found) == len(wanted), f"{where}, row {row}: {found} and {wanted}"
        swapped = score_P[sorted(found ^ wanted)]
        spread = float(swapped.max() - swapped.min())
        assert spread <= NEAR * float(score_P.abs().max()), f"{where}, row {row}: {found ^ wanted} are {spread} apart"
    return len(different)
