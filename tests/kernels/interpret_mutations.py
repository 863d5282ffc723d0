"""What the tests of the kernels can see: one wrong line at a time, and the check that it fails.

Each check is a small case of the properties beside this file. What an interpreter cannot see, the compiler's tests and
`gpu_ci/` have to: docs/gpu.md has the list.
"""

import faulthandler
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import scores
import torch
from draw import Call, layout_of, numbers
from interpret_selection import TORCH, check_orders, select
from interpret_topk import ranking
from scores import Ranking
from strict_interpreter import backwards

from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch.compress import compress_keys as torch_compress
from mcore_dsa.backends.triton import select as selecting
from mcore_dsa.backends.triton.scratch import smallest_score_bytes
from mcore_dsa.kernels import compress, scoring, topk
from mcore_dsa.kernels.tiles import POOLS
from mcore_dsa.kpool import PoolLayout

MODULES = {"scoring": scoring, "topk": topk, "compress": compress}


def the_best(kernels: dict[str, ModuleType]) -> None:
    """The top-k alone: ties at the cut, a slope, plateaus, rows that take all; one block, and several."""
    one_a_group = torch.ones(700, dtype=torch.int64)
    one_a_group[::32] += torch.arange(22)
    slope = torch.arange(1, 700)
    rows = [ranking(300, 5, 3, 1), ranking(700, 70, 2**32 - 1, 2), Ranking(0, slope), ranking(9, 1, 2, 3)]
    rows += [Ranking(0, one_a_group)]
    for budget, tiles in ((20, None), (140, None), (40, 3), (10, 2)):
        expected = torch.stack([row.best(budget, 7) for row in rows])
        assert torch.equal(scores.select(rows, budget, tiles=tiles, first_pool_id=7), expected)


def the_best_backwards(kernels: dict[str, ModuleType]) -> None:
    """Forward, what a program writes into the lines of those behind it is written over."""
    rows = [ranking(300, 5, 3, 1), ranking(9, 1, 2, 3), ranking(290, 70, 9, 2)]
    for tiles in (None, 3):
        with backwards():
            assert torch.equal(scores.select(rows, 40, tiles=tiles), torch.stack([row.best(40, 0) for row in rows]))


def scored_backwards(kernels: dict[str, ModuleType]) -> None:
    with backwards():
        scored(kernels)


def the_best_of_many(kernels: dict[str, ModuleType]) -> None:
    """More groups than a program has in hand at a time."""
    for row, budget in ((ranking(36_000, 3, 2**32 - 1, 4), 700), (ranking(36_000, 3, 1, 4), 1100)):
        assert torch.equal(scores.select([row], budget)[0], row.best(budget, 0))


def scored(kernels: dict[str, ModuleType]) -> None:
    """Documents, two samples, heads and channels that fill no power of two, infinities and NaN; blocks and strips."""
    segments = [[(0, 90), (90, 250)], [(2, 249)]]
    layout = layout_of(segments, num_tokens=250, pool_size=1)
    position = torch.tensor([60, 70, 89, 150, 170, 247, 248, 249, 240])
    q, weights, key = numbers("special", len(position), 250, 2, 3, 16, seed=5)
    call = Call(q.bfloat16(), weights, key.bfloat16(), segments, layout, position, 40)
    expected, _ = select(TORCH, call)
    for score_bytes in (smallest_score_bytes(3, 40), 1 << 24):
        assert torch.equal(selected(call, score_bytes), expected)


def scored_far(kernels: dict[str, ModuleType]) -> None:
    """A row of more tiles than a program has."""
    pools = (scoring.CHUNK + 2) * POOLS
    layout, position = layout_of([[(0, pools)]], num_tokens=pools, pool_size=1), torch.tensor([pools - 1])
    q, weights, key = numbers("plateau", 1, pools, 1, 4, 16, seed=6)
    call = Call(q.bfloat16(), weights, key.bfloat16(), [[(0, pools)]], layout, position, 900)
    assert torch.equal(selected(call, 1 << 24), select(TORCH, call)[0])


def scored_out_of_order(kernels: dict[str, ModuleType]) -> None:
    """Rows of one tile in documents far apart, the later ones in between."""
    segments = [[(0, 200), (200, 400), (400, 600), (600, 800)]]
    layout = layout_of(segments, num_tokens=800, pool_size=1)
    position = torch.tensor([399, 398, 397, 199, 799, 599])
    q, weights, key = numbers("plateau", len(position), 800, 1, 4, 16, seed=7)
    call = Call(q.bfloat16(), weights, key.bfloat16(), segments, layout, position, 30)
    assert torch.equal(selected(call, 1 << 24), select(TORCH, call)[0])


def selected(call: Call, score_bytes: int) -> torch.Tensor:
    return selecting.select_pools(
        call.q_SBHD,
        call.weights_SBH,
        call.pool_key_PBD,
        call.layout,
        call.layout.bounds(call.position_S),
        budget=call.budget,
        score_bytes=score_bytes,
        use_relu=call.use_relu,
        counters=SelectionCounters(),
    )


def ordered(kernels: dict[str, ModuleType]) -> None:
    """The interpreter's sums are never -0.0: orders of numbers as they are."""
    check_orders(kernels["scoring"].ordered)


def compressed(kernels: dict[str, ModuleType]) -> None:
    layout = PoolLayout.from_cu_seqlens(torch.tensor([0, 9, 40]), pool_size=4, num_tokens=42, batch=2)
    key, gate = (torch.randn(42, 2, 24, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    gate[8:12] *= 40
    ape = torch.randn(4, 24, generator=torch.Generator().manual_seed(3))
    found = kernels["compress"].compress_keys(key, 4 * gate, ape, layout)
    assert torch.equal(found, torch_compress(key, 4 * gate, ape, layout))


Check = Callable[[dict[str, ModuleType]], None]
CHECKS: tuple[Check, ...] = (
    the_best,
    the_best_of_many,
    the_best_backwards,
    scored,
    scored_backwards,
    scored_far,
    scored_out_of_order,
    ordered,
    compressed,
)

# Name: module, line, what stands in its place, and what sees it.
MUTATIONS: dict[str, tuple[str, str, str, Check]] = {
    "the last tile is left out": (
        "scoring",
        "(first + visible + POOLS - 1) // POOLS",
        "(first + visible) // POOLS",
        scored,
    ),
    "a pool too many is seen": ("scoring", "tl.where(rank < visible", "tl.where(rank <= visible", scored),
    "a program's last tile is left out": ("scoring", "begin_tile + CHUNK)", "begin_tile + CHUNK - 1)", scored_far),
    "a lane of a row further on is not masked": (
        "scoring",
        "mine = (base <= tile) & (tile < end)",
        "mine = tile < end",
        scored_out_of_order,
    ),
    "every block begins at the first pool": (
        "scoring",
        "base = first // POOLS + begin",
        "base = first // POOLS",
        scored,
    ),
    "every sample is the first": ("scoring", "line = (row * batch + sample)", "line = (row * batch)", scored),
    "head weights are left out": ("scoring", "part = part * tl.load", "part = part + 0 * tl.load", scored),
    "heads that are not there count": ("scoring", "if HEADS_2 != HEADS:", "if HEADS_2 < HEADS:", scored),
    "NaN is not the lowest": ("scoring", "tl.where(score == score, order, 1)", "order", scored),
    "-0.0 is below 0.0": ("scoring", "(((bits & 0x7FFFFFFF) ^ sign) - sign)", "(bits ^ (sign & 0x7FFFFFFF))", ordered),
    "maxima are minima": ("scoring", "peak = tl.max(", "peak = tl.min(", scored),
    "no ReLU": ("scoring", "tl.maximum(part, 0.0,", "tl.maximum(part, -1e9,", scored),
    "too many of equal scores": (
        "topk",
        "is_level & (level_here < equals)",
        "is_level & (level_here <= equals)",
        the_best,
    ),
    "of equal scores the last": (
        "topk",
        "tl.cumsum(both, 0) - both",
        "tl.cumsum(both, 0, reverse=True) - both",
        the_best,
    ),
    "equal scores that are not taken take a place": ("topk", "tl.minimum(level_here, equals)", "level_here", the_best),
    "the cut counts itself as above": ("topk", "digits > digit", "digits >= digit", the_best),
    "the cut is one too high": (
        "topk",
        "(reaching >= want).to(tl.int32), 0) - 1",
        "(reaching >= want).to(tl.int32), 0)",
        the_best,
    ),
    "the last digit is left out": ("topk", "tl.static_range(4)", "tl.static_range(3)", the_best),
    "other prefixes count": ("topk", "((value >> 8) == cut)", "((value >> 8) >= cut)", the_best),
    "a group at the bound is left out": ("topk", "peak >= bound", "peak > bound", the_best),
    "the bound is of too few groups": ("topk", "if end - begin >= budget:", "if end - begin >= 0:", the_best),
    "the list begins again": ("topk", "peak_ptr + listed + run - 1", "peak_ptr + run - 1", the_best_of_many),
    "the tail of the list is left out": (
        "topk",
        "listed * GROUP, BLOCK)",
        "listed * GROUP // BLOCK * BLOCK, BLOCK)",
        the_best_of_many,
    ),
    "the tail of the survivors is left out": (
        "topk",
        "tl.range(0, survivors, BLOCK)",
        "tl.range(0, survivors // BLOCK * BLOCK, BLOCK)",
        the_best,
    ),
    "survivors begin again": ("topk", "order_ptr + survivors + run - 1", "order_ptr + run - 1", the_best_of_many),
    "survivors take the columns of others": (
        "topk",
        "column_ptr + survivors + run - 1",
        "column_ptr + survivors + run",
        the_best,
    ),
    "what equals the bound does not survive": ("topk", "(value >= bound)", "(value > bound)", the_best),
    "two counts share too few bits": (
        "topk",
        "is_level.to(tl.int32) << 16",
        "is_level.to(tl.int32) << 8",
        the_best_of_many,
    ),
    "what was kept loses its ids": ("topk", "column < kept, pool_id", "column < 0, pool_id", the_best),
    "what was kept loses its scores": ("topk", "tl.store(order_ptr + place, value, mask=taken)", "pass", the_best),
    "what was kept has no maxima": (
        "topk",
        "        _peaks_of_kept(order_ptr",
        "        (order_ptr",
        the_best,
    ),
    "poison behind what was kept": (
        "topk",
        "tl.store(order_ptr + item + lane, value,",
        "tl.store(order_ptr + item + lane, value - 1,",
        the_best,
    ),
    "every block is the first": ("topk", "kept = tl.where(begin == 0, 0, head)", "kept = 0", the_best),
    "rows end with the block before": (
        "topk",
        "- first // POOLS - begin, tiles)",
        "- first // POOLS - begin - 1, tiles)",
        the_best,
    ),
    "rows that take all write on": (
        "topk",
        "tl.store(out_ptr + place, pool_id, mask=place < budget)",
        "tl.store(out_ptr + place, pool_id)",
        the_best_backwards,
    ),
    "groups behind what was kept": (
        "topk",
        "mask=item // GROUP + group < head // GROUP",
        "mask=item + group >= 0",
        the_best_backwards,
    ),
    "every strip has the first one's bounds": (
        "scoring",
        "tl.load(visible_ptr + spot + place",
        "tl.load(visible_ptr + spot - at + place",
        scored,
    ),
    "every strip has the first one's weights": (
        "scoring",
        "weights_ptr += at.to(tl.int64)",
        "weights_ptr += 0 * at.to(tl.int64)",
        scored,
    ),
    "scores of other rows' tiles": (
        "scoring",
        "order, mask=mine[None, :])",
        "order, mask=(mine | True)[None, :])",
        scored_backwards,
    ),
    "maxima of other rows' tiles": (
        "scoring",
        "peak, mask=mine[None, :])",
        "peak, mask=(mine | True)[None, :])",
        scored_backwards,
    ),
    "one more than is seen": ("topk", "place < visible, first_pool_id", "place <= visible, first_pool_id", the_best),
    "pools count from 0": ("topk", "block_id = first_pool_id + (", "block_id = (", the_best),
    "samples are mixed": ("compress", "token, 0) * batch + sample", "token, 0) * batch", compressed),
    "tokens of a pool are samples": ("compress", "key_ptr + (line + j * batch)", "key_ptr + (line + j)", compressed),
    "slots without a pool": ("compress", "tl.where(exists, pooled, 0.0)", "pooled + 1.0", compressed),
    "the greatest is the first": (
        "compress",
        "highest = tl.maximum(highest, logit,",
        "highest = tl.maximum(highest, highest,",
        compressed,
    ),
    "exp has no floor": ("compress", "tl.maximum(x, -87.0,", "tl.maximum(x, -870.0,", compressed),
    "a term of the series is left out": ("compress", "tl.static_range(1, 8)", "tl.static_range(1, 7)", compressed),
    "ln 2 is short": ("compress", "- n * _LN2_LOW", "- n * 0.0", compressed),
}


def install(monkeypatch: pytest.MonkeyPatch, kernels: dict[str, ModuleType]) -> None:
    monkeypatch.setattr(selecting, "scoring", kernels["scoring"])
    monkeypatch.setattr(selecting, "topk", kernels["topk"])
    monkeypatch.setattr(scores, "topk", kernels["topk"])


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_pass(check: Check) -> None:
    assert not fails(check, MODULES)


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_line_is_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, line, wrong, check = MUTATIONS[name]
    source = Path(str(MODULES[module].__file__)).read_text(encoding="utf-8")
    assert line in source
    path = tmp_path / f"wrong_{module}.py"
    path.write_text(source.replace(line, wrong), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    mutant = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    monkeypatch.setitem(sys.modules, path.stem, mutant)
    spec.loader.exec_module(mutant)
    kernels = {**MODULES, module: mutant}
    install(monkeypatch, kernels)
    assert fails(check, kernels)


def fails(check: Check, kernels: dict[str, ModuleType]) -> bool:
    """Whether a check fails, in a process of its own: what writes where it should not may end it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        passed = False
        try:
            check(kernels)
            passed = True
        finally:
            os._exit(0 if passed else 1)
    return os.waitpid(child, 0)[1] != 0
