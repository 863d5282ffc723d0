"""Scores in flight stay under a byte budget whatever the sequence: on torch's allocator, and on the process."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from draw import numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import allocated_bytes

from mcore_dsa.backends.torch.scoring import tile_fingerprint
from mcore_dsa.backends.torch.select import smallest_score_bytes
from mcore_dsa.functions import select_pools
from mcore_dsa.kpool import PoolLayout

MIB = 2**20
CPU = torch.device("cpu")


def peak_beyond_the_result(
    kind: str, *, rows: int, pools: int, heads: int, dim: int, budget: int, score_bytes: int
) -> int:
    """Bytes that rows near the end of one document hold at the most, what they return aside."""
    q, weights, key = numbers(kind, rows, pools, 1, heads, dim, seed=pools)
    layout, position = PoolLayout.dense(pools, pool_size=1), torch.arange(pools - rows, pools)
    # The proof that a place in the tile does not matter, once a shape, belongs to no call.
    tile_fingerprint(CPU, heads, dim)
    peak, held = allocated_bytes(
        lambda: select_pools(q, weights, key, layout, position, budget=budget, score_bytes=score_bytes)
    )
    assert held == rows * budget * 4
    return peak - held


@settings(max_examples=20)
@given(
    kind=st.sampled_from(["zeros", "plateau", "normal"]),
    rows=st.integers(1, 300),
    pools=st.integers(700, 3000),
    heads=st.sampled_from([1, 3, 8, 32, 64]),
    dim=st.sampled_from([1, 16, 128]),
    budget=st.sampled_from([1, 7, 130, 600]),
    factor=st.sampled_from([1.0, 1.3, 3.0]),
)
def test_tensors_stay_under_the_budget(heads: int, dim: int, budget: int, factor: float, **call) -> None:
    """From the smallest budget on; ties at the cut take most. Where rows stand, 7 int64 each, is outside of it."""
    score_bytes = int(factor * smallest_score_bytes(CPU, heads, dim, budget))
    sizes = {"heads": heads, "dim": dim, "budget": budget, "score_bytes": score_bytes}
    assert peak_beyond_the_result(**call, **sizes) <= score_bytes + 56 * call["rows"]


def test_the_budget_is_used() -> None:
    """A bound far above the truth would waste it: ties fill at least half."""
    sizes = {"rows": 300, "pools": 20_000, "heads": 8, "dim": 4, "budget": 64, "score_bytes": 8 * MIB}
    assert peak_beyond_the_result("zeros", **sizes) > 4 * MIB


def test_what_is_held_does_not_grow_with_the_length() -> None:
    """Once the budget is full, twice the pools take not a byte more."""
    sizes = {"rows": 100, "heads": 8, "dim": 4, "budget": 64, "score_bytes": 4 * MIB}
    short, long = (peak_beyond_the_result("zeros", pools=pools, **sizes) for pools in (20_000, 40_000))
    assert long <= short


SCRIPT = """
    import ctypes, json, sys, torch
    from draw import numbers
    from mcore_dsa.kpool import PoolLayout
    from mcore_dsa.functions import select_pools

    def resident(field):
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

    torch.set_num_threads(1)
    rows, pools, heads, dim, budget, kind = json.loads(sys.argv[1])
    q, weights, key = numbers(kind, rows, pools, 1, heads, dim, seed=1)
    layout, position = PoolLayout.dense(pools, pool_size=1), torch.arange(pools - rows, pools)
    # What a first call loads once, kernels and their scratch, belongs to no call.
    short = PoolLayout.dense(2000, pool_size=1)
    select_pools(q[:3], weights[:3], key[:2000], short, torch.tensor([1999] * 3), budget=budget, score_bytes=16 << 20)
    extra = {}
    for score_bytes in json.loads(sys.argv[2]):
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as refs:
            refs.write("5")  # the high-water mark starts again from here
        before = resident("VmHWM")
        selection = select_pools(q, weights, key, layout, position, budget=budget, score_bytes=score_bytes)
        extra[score_bytes] = resident("VmHWM") - before - selection.nbytes
        del selection
    print(json.dumps(extra))
"""


def high_water_mark_can_be_reset() -> bool:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


@pytest.mark.skipif(not high_water_mark_can_be_reset(), reason="/proc/self/clear_refs cannot be written here")
def test_the_process_stays_under_the_budget() -> None:
    """Resident memory, so that scratch inside kernels counts, where ties make a selection take most.

    All scores of these rows at once would be 128 MiB, the products of a head and a pool for one tile of rows 64 MiB.
    """
    rows, pools, heads, dim, budget = 256, 1 << 17, 8, 4, 64
    budgets = [16 * MIB, 32 * MIB]
    assert rows * pools * 4 >= 4 * max(budgets)
    arguments = [json.dumps([rows, pools, heads, dim, budget, "zeros"]), json.dumps(budgets)]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments],
        cwd=Path(__file__).parent,
        # Buffers freed go back at once: glibc by default keeps pages, as many again at times, for the next ones.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    small, large = json.loads(run.stdout).values()
    assert small <= 1.1 * budgets[0]
    assert large <= 1.1 * budgets[1]
    # What is measured is really the scores: it follows the budget.
    assert large > 1.5 * small > 4 * MIB
