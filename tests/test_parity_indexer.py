"""The selection against transformers' own indexer, and that this comparison would notice each plausible mistake."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers_indexer import random_indexer

from mcore_dsa.functions import compress_keys, select_pools
from mcore_dsa.fused import fused_qk_topk_kpool
from mcore_dsa.kpool import PoolLayout, expand_selection

HIDDEN, Q_LORA, BATCH = 48, 24, 2
LENGTHS = (1, 3, 4, 5, 17, 64, 257, 515)
PADDINGS = ("none", "left", "right")


@dataclass(frozen=True)
class Case:
    """One forward of transformers' indexer, and its queries, head weights, keys and gates for ours."""

    pool_size: int
    budget: int
    tail: bool
    q_SBHD: Tensor
    weights_SBH: Tensor
    key_SBD: Tensor
    gate_SBD: Tensor
    ape_JD: Tensor
    valid_BS: Tensor
    theirs_BSW: Tensor

    @property
    def contested_BS(self) -> Tensor:
        """Rows that see more pools than the budget."""
        return (self.valid_BS.cumsum(1) * self.valid_BS) // self.pool_size > self.budget


def build_indexer(pool_size: int, index_topk: int, tail: bool, heads: int, dim: int) -> torch.nn.Module:
    indexer = random_indexer(
        HIDDEN, Q_LORA, heads=heads, dim=dim, pool_size=pool_size, index_topk=index_topk, tail=tail
    )
    with torch.no_grad():
        # A gate of about one unit a channel: tokens of a pool differ in weight, and none takes it all.
        indexer.index_kpool_compress_gate.mul_(HIDDEN**-0.5)
        # A large bias is common to all keys: a query against it in every head scores 0.0 for all pools, and torch.topk
        # has no rule for ties.
        indexer.k_norm.bias.mul_(0.3)
    return indexer


@torch.no_grad()
def run(indexer: torch.nn.Module, length: int, padding: str, dtype: torch.dtype = torch.float32) -> Case:
    indexer = indexer.to(dtype)
    hidden = torch.randn(BATCH, length, HIDDEN).to(dtype)
    q_resid = torch.randn(BATCH, length, Q_LORA).to(dtype)
    token = torch.arange(length)
    padded = torch.tensor([[length // 3], [length // 7]])
    valid = {"none": token >= 0 * padded, "left": token >= padded, "right": token < length - padded}[padding]
    theirs = indexer(hidden_states=hidden, q_resid=q_resid, attention_mask=valid, cache=None)
    heads, dim = indexer.n_heads, indexer.head_dim
    weights = hidden.float() @ indexer.weights_proj.weight.float().T * (heads**-0.5 * dim**-0.5)
    return Case(
        pool_size=indexer.index_kpool,
        budget=indexer.index_topk // indexer.index_kpool,
        tail=indexer.index_kpool_always_select_tail,
        q_SBHD=indexer.wq_b(q_resid).view(BATCH, length, heads, dim).transpose(0, 1),
        weights_SBH=weights.transpose(0, 1),
        key_SBD=indexer.k_norm(indexer.wk(hidden)).transpose(0, 1),
        gate_SBD=torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate).transpose(0, 1),
        ape_JD=indexer.index_kpool_compress_ape,
        valid_BS=valid,
        theirs_BSW=theirs,
    )


@cache
def cases() -> tuple[Case, ...]:
    """Pools of 4 with tails, then of 3 without, under head counts and widths that fill no tile either."""
    torch.manual_seed(2)
    found = []
    for pool_size, index_topk, tail, heads, dim in ((4, 32, True, 16, 32), (3, 24, False, 12, 20)):
        indexer = build_indexer(pool_size, index_topk, tail, heads, dim)
        found += [run(indexer, length, padding) for length in LENGTHS for padding in PADDINGS]
    return tuple(found)


def ours(
    case: Case,
    *,
    layout: PoolLayout | None = None,
    position: Tensor | None = None,
    pool_key: Tensor | None = None,
    use_relu: bool = True,
    **changed: Tensor,
) -> Tensor:
    """Token ids from this project's parts; what is passed stands in for the right thing."""
    q, weights, key, gate, ape = (
        changed.get(name, getattr(case, name)) for name in ("q_SBHD", "weights_SBH", "key_SBD", "gate_SBD", "ape_JD")
    )
    right = PoolLayout.from_padding_mask(case.valid_BS, pool_size=case.pool_size)
    layout = right if layout is None else layout
    pool_key = compress_keys(key, gate, ape, layout) if pool_key is None else pool_key
    rows = torch.arange(case.valid_BS.shape[1])
    position = rows if position is None else position
    selection = select_pools(q, weights, pool_key, layout, position, budget=case.budget, use_relu=use_relu)
    return expand_selection(selection, layout, position, always_select_tail=case.tail)


def differs(case: Case, token_BSW: Tensor) -> Tensor:
    """bool `[b, s]`: valid rows whose set of tokens is another than transformers'. -1 fills both to one width."""
    width = case.budget * case.pool_size
    assert case.theirs_BSW.shape[2] == width + (case.pool_size - 1 if case.tail else 0)
    same = token_BSW.sort(dim=-1).values == case.theirs_BSW.sort(dim=-1).values
    return ~same.all(-1) & case.valid_BS


def test_enough_is_compared() -> None:
    """Figures that the two tests below rest on."""
    assert {case.valid_BS.shape for case in cases()} == {(BATCH, length) for length in LENGTHS}
    assert all(case.q_SBHD.shape[2] >= 8 and case.budget * case.pool_size <= 32 for case in cases())
    assert sum(int(case.valid_BS.sum()) for case in cases()) >= 5000
    assert sum(int(case.contested_BS.sum()) for case in cases()) >= 2000
    assert {case.tail for case in cases()} == {True, False}


def test_equal_sets_in_fp32() -> None:
    for case in cases():
        token_BSW = ours(case)
        assert not differs(case, token_BSW).any()
        assert torch.equal(token_BSW[~case.valid_BS], torch.full_like(token_BSW[~case.valid_BS], -1))


def test_equal_sets_through_the_drop_in() -> None:
    """Unpadded samples as a dense call; right padding that all samples share through cu_seqlens and varlen bounds."""
    rows = contested = 0
    for case in cases():
        length = case.valid_BS.shape[1]
        settings = {"index_topk": case.budget * case.pool_size, "pool_size": case.pool_size}
        for sample in range(BATCH):
            one, valid = slice(sample, sample + 1), int(case.valid_BS[sample].sum())
            if not case.valid_BS[sample, :valid].all():
                continue
            bounds = {
                "cu_seqlens_kv": torch.tensor([0, valid]),
                "varlen_starts": torch.zeros(length, dtype=torch.int64),
                "varlen_ends": torch.arange(1, length + 1).where(case.valid_BS[sample], 0),
            }
            keys = ["cu_seqlens_kv"] if sample else ["varlen_starts", "varlen_ends"]
            scores, token_BSW = fused_qk_topk_kpool(
                case.q_SBHD[:, one],
                case.key_SBD[:, one],
                case.weights_SBH[:, one],
                **settings,
                gate_score=case.gate_SBD[:, one],
                ape=case.ape_JD,
                always_select_tail=case.tail,
                **({} if case.valid_BS.all() else {key: bounds[key] for key in keys}),
            )
            assert scores is None
            whole = case.theirs_BSW.clone()
            whole[one] = token_BSW
            assert not differs(case, whole).any()
            rows += valid
            contested += int(case.contested_BS[sample].sum())
    assert rows >= 5000
    assert contested >= 2000


def dense(case: Case) -> PoolLayout:
    return PoolLayout.dense(case.valid_BS.shape[1], pool_size=case.pool_size, batch=BATCH)


def softmax_over_channels(case: Case) -> Tensor:
    layout = PoolLayout.from_padding_mask(case.valid_BS, pool_size=case.pool_size)
    token = (layout.pool_token_BP.clamp(min=0).T.unsqueeze(-1) + torch.arange(case.pool_size)).unsqueeze(-1)
    sample = torch.arange(BATCH).view(1, BATCH, 1, 1)
    channel = torch.arange(case.key_SBD.shape[2])
    logits = case.gate_SBD[token, sample, channel] + case.ape_JD
    return (logits.softmax(-1) * case.key_SBD[token, sample, channel]).sum(2)


def relu_of_the_sum(case: Case) -> Tensor:
    one_head = (case.q_SBHD * case.weights_SBH.unsqueeze(-1)).sum(2, keepdim=True)
    return ours(case, q_SBHD=one_head, weights_SBH=torch.ones_like(case.weights_SBH[..., :1]))


def seen_ahead(case: Case, tokens: int) -> Tensor:
    """Pools as a row standing `tokens` further on sees them, beside the right tail."""
    token_BSW = ours(case)
    ahead = ours(case, position=torch.arange(case.valid_BS.shape[1]) + tokens)
    width = case.budget * case.pool_size
    return torch.cat([ahead[..., :width], token_BSW[..., width:]], dim=-1)


def without_tail(case: Case) -> Tensor:
    token_BSW = ours(case)
    token_BSW[..., case.budget * case.pool_size :] = -1
    return token_BSW


# Each beside the share of contested rows that it must change at least: no more than half of what it does (M).
MISTAKES: dict[str, tuple[Callable[[Case], Tensor], float]] = {
    "gate dropped": (lambda case: ours(case, gate_SBD=torch.zeros_like(case.gate_SBD)), 0.4),
    "ape dropped": (lambda case: ours(case, ape_JD=torch.zeros_like(case.ape_JD)), 0.4),
    "ape reversed": (lambda case: ours(case, ape_JD=case.ape_JD.flip(0)), 0.4),
    "softmax over channels": (lambda case: ours(case, pool_key=softmax_over_channels(case)), 0.4),
    "weights without sign": (lambda case: ours(case, weights_SBH=case.weights_SBH.abs()), 0.4),
    "one weight for all heads": (lambda case: ours(case, weights_SBH=torch.ones_like(case.weights_SBH)), 0.4),
    "no relu": (lambda case: ours(case, use_relu=False), 0.4),
    "relu of the sum over heads": (relu_of_the_sum, 0.4),
    "heads in another order": (lambda case: ours(case, weights_SBH=case.weights_SBH.flip(2)), 0.4),
    "pool seen from its first token on": (lambda case: seen_ahead(case, case.pool_size - 1), 0.06),
    "pool seen one token late": (lambda case: seen_ahead(case, -1), 0.03),
    "no tail": (without_tail, 0.18),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_notices(mistake: str) -> None:
    wrong, least = MISTAKES[mistake]
    changed = contested = 0
    for case in cases():
        if case.valid_BS.shape[1] >= 257:
            rows = case.contested_BS
            changed += int((differs(case, wrong(case)) & rows).sum())
            contested += int(rows.sum())
    assert changed >= least * contested


def test_the_comparison_notices_pools_from_the_first_slot() -> None:
    """Left padding alone shows whether pools begin at the first valid token."""
    for case in cases():
        if case.valid_BS.shape[1] >= 257:
            differing = differs(case, ours(case, layout=dense(case)))
            left_padded = ~case.valid_BS[:, 0]
            assert differing[left_padded].sum() >= 0.4 * (case.contested_BS[left_padded]).sum()


def test_pools_agree_in_bfloat16() -> None:
    """Contested rows at 128 channels and a budget of 32 pools; transformers rounds its sums over a pool to bfloat16."""
    torch.manual_seed(3)
    indexer = build_indexer(4, 128, True, heads=32, dim=128)
    equal = selected = rows = 0
    for padding in PADDINGS:
        case = run(indexer, 515, padding, torch.bfloat16)
        assert case.key_SBD.dtype == torch.bfloat16
        # Left padding may cut pools anywhere: their first tokens name them.
        mine, theirs = (
            token_BSW[..., : 128 : case.pool_size][case.contested_BS] for token_BSW in (ours(case), case.theirs_BSW)
        )
        assert min(mine.min(), theirs.min()) >= 0
        equal += int((mine.unsqueeze(-1) == theirs.unsqueeze(-2)).sum())
        selected += mine.numel()
        rows += len(mine)
    assert rows >= 1000
    assert equal >= 0.995 * selected
