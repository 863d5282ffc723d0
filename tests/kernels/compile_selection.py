"""The selection's kernels compiled for the GPUs they are for: what a program takes, and what its machine code does.

`triton.compile` checks no limit: a kernel that asks for more tensor memory than there is becomes an empty `trap`.
"""

import re
from typing import Any

import pytest
import torch
from ahead import MATRIX, MOST_SHARED, MOST_TMEM, Binary, binaries_of_calls, compile_for

from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.choice import MOST_POOL_SIZE, Target, triton_refusal
from mcore_dsa.backends.triton.select import select_pools
from mcore_dsa.kernels import compress, scoring, tiles, topk
from mcore_dsa.kpool import PoolLayout

STRIP = {"first_ptr": "*i32", "visible_ptr": "*i32", "order_ptr": "*u32", "peak_ptr": "*u32"}
SCORE = {"q_ptr": "*bf16", "weights_ptr": "*fp32", "key_ptr": "*bf16", **STRIP}
SELECT = {**STRIP, "column_ptr": "*i32", "out_ptr": "*i32"}
COMPRESS = {"key_ptr": "*bf16", "gate_ptr": "*bf16", "ape_ptr": "*fp32", "token_ptr": "*i64", "out_ptr": "*bf16"}

# Registers a thread and programs a multiprocessor at heads x channels: GLM-5.3-Flash's, the greatest, the smallest.
SHAPES = {
    90: {(32, 128): (128, 2), (64, 128): (128, 2), (24, 112): (128, 2), (1, 16): (128, 2)},
    100: {(32, 128): (200, 1), (64, 128): (184, 1), (1, 16): (128, 2)},
}


def check_limits(binary: Binary) -> None:
    assert binary.stack <= 16
    assert binary.count("LDL", "STL") <= 8
    assert binary.shared <= MOST_SHARED
    assert binary.tmem <= MOST_TMEM
    assert "trap" not in binary.ptx
    assert ".ftz" not in binary.ptx
    # Histograms count in shared memory, where the order of the adds does not matter; nothing else adds as it arrives.
    assert not re.findall(r"\b(?:atom|red)\.(?!shared)", binary.ptx)


def check_roundings(binary: Binary) -> None:
    """Every operation of fp32 rounds by itself, and to the nearest."""
    assert not re.findall(r"\bfma\.", binary.ptx)
    assert not re.findall(r"\b(?:add|sub|mul|div)(?!\.rn)[.a-z]*\.f32\b", binary.ptx)


def maxima(binary: Binary) -> int:
    """Those of two fp32 numbers; sm_100 takes two at a time. All keep NaN, which the interpreter's do in any case."""
    assert not re.findall(r"\bmax\.(?!NaN)[.a-z]*f32\b", binary.ptx)
    return sum(operands.count(",") - 1 for operands in re.findall(r"\bmax\.NaN\.f32\s([^;]*);", binary.ptx))


@pytest.mark.parametrize(
    ("capability", "heads", "dim"), [(c, *shape) for c, shapes in SHAPES.items() for shape in shapes]
)
def test_scores(capability: int, heads: int, dim: int) -> None:
    assert triton_refusal(Target("cuda", divmod(capability, 10), "3.7.1", (torch.bfloat16,), heads, dim)) == ""
    options = scoring.options(capability // 10)
    binary = compile_for(capability, scoring.score_kernel, SCORE, scoring.constants(heads, dim, True), options)
    registers, programs = SHAPES[capability][heads, dim]
    check_limits(binary)
    check_roundings(binary)
    assert binary.registers <= registers
    assert binary.programs(options["num_warps"]) >= programs
    assert binary.count(*MATRIX) > 0
    assert binary.count({90: "HGMMA", 100: "UTCHMMA"}[capability]) > 0 or heads == 1
    assert maxima(binary) > 0
    # Keys come by asynchronous copies, 16 bytes a lane; narrower ones would be none.
    assert "cp.async.cg.shared.global" in binary.ptx or heads == 1


@pytest.mark.parametrize("capability", SHAPES)
def test_the_best(capability: int) -> None:
    constants = {"POOLS": tiles.POOLS, "GROUP": tiles.GROUP, "BLOCK": topk.BLOCK}
    binary = compile_for(capability, topk.select_kernel, SELECT, constants, topk.OPTIONS)
    check_limits(binary)
    assert binary.registers <= 84
    # An interpreter sees none of them: those between stores and loads of one program, and those of its sums.
    assert len(re.findall(r"\bbar\.sync\b", binary.ptx)) == 105
    assert binary.programs(topk.OPTIONS["num_warps"]) >= 6


@pytest.mark.parametrize(("capability", "size"), [(90, 1), (90, 4), (100, 4), (100, MOST_POOL_SIZE)])
def test_compression(capability: int, size: int) -> None:
    constants: dict[str, Any] = {"DIM": 128, "SIZE": size, "SERIES": compress._SERIES, "BLOCK": compress.BLOCK}
    binary = compile_for(capability, compress.compress_kernel, COMPRESS, constants, compress.OPTIONS)
    check_limits(binary)
    check_roundings(binary)
    assert binary.registers <= (80 if size <= 4 else 255)
    # Of each of a thread's elements: the greatest logit, and of every weight the floor of `exp`.
    assert maxima(binary) == compress.BLOCK // (32 * compress.OPTIONS["num_warps"]) * (size - 1 + size)
    assert "cvt.rn.bf16" in binary.ptx


def test_what_is_looked_for_is_found() -> None:
    """The same kernels compiled otherwise: fused, and without room for their registers."""
    constants = scoring.constants(32, 128, True)
    fused = {**scoring.options(9), "enable_fp_fusion": True}
    with pytest.raises(AssertionError):
        check_roundings(compile_for(90, scoring.score_kernel, SCORE, constants, fused))
    with pytest.raises(AssertionError):
        check_limits(compile_for(90, scoring.score_kernel, SCORE, constants, {**scoring.options(9), "maxnreg": 96}))


def test_one_binary_whatever_the_size_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, pools, budgets, documents and strips; also of ones and sixteens, for which Triton would compile anew."""
    built = binaries_of_calls(90, monkeypatch)
    monkeypatch.setattr(scoring, "device_major", lambda _device: 9)
    for pools, budget, rows, score_bytes in ((700, 1, 5, 1 << 20), (1301, 7, 1, 100_000), (1040, 512, 16, 1 << 24)):
        layout = PoolLayout.dense(pools, pool_size=1, batch=rows % 2 + 1)
        position = torch.arange(pools - rows, pools)
        q, weights = torch.zeros(rows, layout.batch, 32, 128).bfloat16(), torch.zeros(rows, layout.batch, 32)
        key = torch.zeros(pools, layout.batch, 128).bfloat16()
        counters, bounds = SelectionCounters(), layout.bounds(position)
        options: dict[str, Any] = {"budget": budget, "score_bytes": score_bytes, "use_relu": True}
        select_pools(q, weights, key, layout, bounds, **options, counters=counters)
        compress.compress_keys(key, key, torch.zeros(1, 128), layout)
    assert {name: len(binaries) for name, binaries in built.items()} == dict.fromkeys(
        ("score_kernel", "select_kernel", "compress_kernel"), 1
    )
