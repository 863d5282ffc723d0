"""Context parallelism, alone and with tensor parallelism, dense and packed.

Given equal queries, weights, keys and gates, every layout selects what one rank does, bit for bit; through a whole
model two layouts differ by the rounding of their projections and of sums over ranks.
"""

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks, run_ranks
from models import OFF, POOL, ROWS, assert_equal, gpt, under_each
from packs import Pack, Pass, assert_close, assert_same_or_near_tie, run_dense, run_pack
from torch import Tensor

from mcore_dsa import PoolLayout, compress_keys, select_pools
from mcore_dsa.backends import SelectionCounters, resolve
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.settings import PARTITION_VARIABLE, Partition
from mcore_dsa.sharded import gather_of
from mcore_dsa.source import Projections, Scored, SelectionRequest

HEADS, DIM, BUDGET = 8, 16, 3
KINDS: tuple[Partition, ...] = ("off", "contiguous", "zigzag")


def random_pack(seed: int, cp: int, tp: int) -> Pack:
    """Up to seven documents, some of them short or empty, of padded lengths that a layout divides."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    lengths = [draw(2) * draw(60) for _ in range(draw(7) + 1)]
    unit = 2 * cp * tp
    rooms = [(-(-length // unit) + draw(4) // 3) * unit for length in lengths]
    if not sum(rooms):
        rooms[-1] = unit
    return Pack(tuple(lengths), tuple(rooms))


def projections_of(pack: Pack, seed: int) -> Projections:
    """Of every token; half the scores tie, in small integers."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        if seed % 2:
            return torch.randint(-2, 3, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    tokens = pack.tokens
    return Projections(
        draw(tokens, 1, HEADS, DIM), draw(tokens, 1, HEADS), draw(tokens, 1, DIM), draw(tokens, 1, DIM), draw(POOL, DIM)
    )


def select_alone(pack: Pack, made: Projections) -> Tensor:
    ends = [start + own for start, own in zip(pack.starts, pack.lengths, strict=True)]
    segments = torch.tensor([pack.starts, ends]).unsqueeze(1)
    layout = PoolLayout.from_segments(*segments, num_tokens=pack.tokens, pool_size=POOL)
    pool_key = compress_keys(made.key_LBD, made.gate_LBD, made.ape_JD, layout)
    return select_pools(made.q_LBHD, made.weights_LBH, pool_key, layout, budget=BUDGET)


def selected(seeds: list[int], tp_size: int, cp_size: int) -> int:
    """Selections of this rank's rows that differ from one rank's, over all seeds and partitions; and how many rows."""
    rank = dist.get_rank()
    tp_rank, cp_rank = rank % tp_size, rank // tp_size
    # Every rank has to make every group.
    tp_groups = [dist.new_group(list(range(c * tp_size, (c + 1) * tp_size))) for c in range(cp_size)]
    cp_groups = [dist.new_group(list(range(t, tp_size * cp_size, tp_size))) for t in range(tp_size)]
    tp, cp = tp_groups[cp_rank], cp_groups[tp_rank]
    compared = 0
    for seed in seeds:
        pack = random_pack(seed, cp_size, tp_size)
        made, params = projections_of(pack, seed), pack.params()
        rows_S = pack.rows(cp_rank, cp_size)
        held_L = rows_S.chunk(tp_size)[tp_rank]
        mine = Projections(*(x[held_L] for x in made[:4]), made.ape_JD)
        alone = select_alone(pack, made)
        for kind in KINDS:
            plan = SelectionPlan.packed(
                params.cu_seqlens_q,
                params.cu_seqlens_q_padded,
                pool_size=POOL,
                budget=BUDGET,
                partition=kind,
                tp_rank=tp_rank,
                tp_size=tp_size,
                cp_rank=cp_rank,
                cp_size=cp_size,
            )
            gather = gather_of(plan, tp, budget=BUDGET, overlap=True)
            source = Scored(
                backend=resolve(),
                group=tp,
                context_group=cp,
                score_bytes=2**26,
                use_relu=True,
                counters=SelectionCounters(),
            )
            own = source.own_rows(SelectionRequest(1, plan, BUDGET, lambda mine=mine: mine, gather))
            assert torch.equal(gather.finish(own), alone[:, rows_S]), (seed, kind, pack)
            compared += len(rows_S)
    return compared


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (1, 4), (2, 2), (2, 1), (1, 3)])
def test_every_layout_selects_what_one_rank_does(tp: int, cp: int) -> None:
    """Forty packs each, two hundred in all."""
    for compared in run_ranks(selected, tp * cp, list(range(40)), tp, cp, timeout=120.0):
        assert compared > 3000 / cp


# Of a part of a pack's rows the selections, where they stand among all rows.
def placed(passes: Sequence[Pass], number: int, tokens: int) -> Tensor:
    """One layer's selection of every token, of the passes of all context-parallel ranks."""
    whole_BTK = passes[0].selections[number].new_full((passes[0].selections[number].shape[0], tokens, TOPK), -7)
    for one in passes:
        whole_BTK[:, one.rows_X] = one.selections[number]
    return whole_BTK


TOPK = 4
PACK = Pack.of(37, 0, 72, 5, 24, multiple=8, behind=1)
LAYOUTS = [(1, 2), (1, 4), (2, 2)]
KINDS_OF_INPUT: dict[str, tuple[Any, Any]] = {"dense": (run_dense, ROWS), "packed": (run_pack, PACK)}


@functools.cache
def one_rank(kind: str, host: Any = gpt) -> tuple[Pass, Pass]:
    run, what = KINDS_OF_INPUT[kind]
    (one,), (moved,) = (megatron_ranks(run, 1, what, host, moved, env=OFF) for moved in (False, True))
    return one, moved


@pytest.mark.parametrize("kind", KINDS_OF_INPUT)
@pytest.mark.parametrize(("tp", "cp"), LAYOUTS)
def test_a_model_is_one_ranks_but_for_rounding(tp: int, cp: int, kind: str) -> None:
    (one, moved), (run, what) = one_rank(kind), KINDS_OF_INPUT[kind]
    tokens = what.tokens if kind == "packed" else what
    words = ("1", "zigzag") if tp > 1 else ("1",)
    envs = [OFF, *({PARTITION_VARIABLE: word} for word in words)]
    off, *others = zip(*megatron_ranks(under_each, tp * cp, envs, run, what, tp=tp, cp=cp), strict=True)
    for word, on in zip(words, others, strict=True):
        for left, right in zip(off, on, strict=True):
            for part in ("loss", "losses_X", "selections", "gradients"):
                assert_equal(getattr(left, part), getattr(right, part), f"{word}: {part}")
    assert abs(off[0].loss - one.loss) <= 8 * abs(moved.loss - one.loss) + 1e-6 * abs(one.loss)
    for rank in off:
        assert_close(rank.gradients, one.gradients, moved.gradients, f"TP {tp}, CP {cp}, {kind}")
    lengths = torch.tensor(PACK.lengths) if kind == "packed" else torch.tensor([tokens])
    starts = torch.tensor(PACK.padded if kind == "packed" else [tokens]).cumsum(0)
    starts = torch.cat([starts.new_zeros(1), starts[:-1]])
    layout = PoolLayout.from_segments(starts[None], (starts + lengths)[None], num_tokens=tokens, pool_size=POOL)
    for number in range(2):
        found = placed(off[::tp], number, tokens)
        assert not bool((found == -7).any())
        made = one.projections[number]
        of_sample = Projections(*(x[:, :1] for x in made[:4]), made.ape_JD)
        assert_same_or_near_tie(found[0], one.selections[number][0], of_sample, layout, f"layer {number}")
