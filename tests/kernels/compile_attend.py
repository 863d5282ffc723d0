"""Sparse attention compiled for the GPUs it is for: what a program takes, and what its machine code does.

In the published geometry; bounds are those of the table of 2026-12-03 in benchmarks/LOG.md.
"""

import re
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from ahead import MATRIX, MOST_SHARED, MOST_TMEM, Binary, binaries_of_calls, compile_for

from mcore_dsa.backends import AttentionCall
from mcore_dsa.backends.choice import MOST_POOL_SIZE
from mcore_dsa.backends.triton import attend as triton_attention
from mcore_dsa.kernels.attend_rows import GRAD_SLOTS, HEADS, SLOTS, attend_kernel, grad_warps, query_grad_kernel
from mcore_dsa.kernels.attend_slots import CELL_TOKENS, COLUMNS, GRAD_HEADS, add_kernel, cell_kernel, slot_grad_kernel
from mcore_dsa.kernels.items import OPTIONS, fault_kernel
from mcore_dsa.kernels.tiles import CELL_SLOTS, CHAIN
from mcore_dsa.kpool import PoolLayout

BF16 = ("q_ptr", "kv_ptr", "out_ptr", "out_grad_ptr", "q_grad_ptr")
FP32 = ("norm_ptr", "delta_ptr", "sum_ptr", "slot_grad_ptr")
INT32 = ("selection_ptr", "cell_ptr")

SIZES = {"J": 4, "C": 512, "C_PADDED": 512}
PRECISION = {"OPERAND": tl.bfloat16, "SPLIT": True}
ROWS = SIZES | PRECISION | {"TAIL": True, "HEADS": HEADS}

# Kernel, constants, warps; registers and programs of a multiprocessor on sm_90a and sm_100a.
PRODUCTS: dict[str, tuple[Any, dict[str, Any], dict[int, tuple[int, int]]]] = {
    "attend": (attend_kernel, ROWS | {"SLOTS": SLOTS}, {90: (200, 2), 100: (152, 3)}),
    "query_grad": (query_grad_kernel, ROWS | {"SLOTS": GRAD_SLOTS}, {90: (192, 2), 100: (192, 2)}),
    "slot_grad": (
        slot_grad_kernel,
        ROWS | {"HEADS": GRAD_HEADS, "SLOTS": CELL_SLOTS},
        {90: (168, 3), 100: (168, 2)},
    ),
}
OTHERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "add": (add_kernel, SIZES | {"TOKENS": CELL_TOKENS, "CHAIN": CHAIN}, 4),
    "add alone": (add_kernel, SIZES | {"J": 1, "TOKENS": 1, "CHAIN": CHAIN}, 4),
    "add many": (add_kernel, SIZES | {"J": MOST_POOL_SIZE, "TOKENS": CELL_TOKENS, "CHAIN": CHAIN}, 4),
    "cells": (cell_kernel, {"J": 4, "TAIL": True, "COLUMNS": COLUMNS}, 1),
    "faults": (fault_kernel, {"COLUMNS": 128}, 1),
}


def pointer(name: str) -> str:
    kinds = {"*bf16": BF16, "*fp32": FP32, "*i32": INT32, "*i8": ("fault_ptr",)}
    return next((kind for kind, names in kinds.items() if name in names), "*i64")


def compiled(capability: int, kernel: Any, constants: dict[str, Any], warps: int = 4) -> Binary:
    """As `items.launch` compiles it."""
    types = {name: pointer(name) for name in kernel.arg_names if name.endswith("_ptr")}
    types |= {name: "fp32" for name in kernel.arg_names if name == "scale"}
    return compile_for(capability, kernel, types, constants, OPTIONS | {"num_warps": warps})


def check_limits(binary: Binary) -> None:
    assert binary.stack <= 16
    assert binary.count("LDL", "STL") <= 8
    assert binary.shared <= MOST_SHARED
    assert binary.tmem <= MOST_TMEM
    assert "trap" not in binary.ptx
    assert ".ftz" not in binary.ptx


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, capability: int) -> None:
    kernel, constants, limits = PRODUCTS[name]
    binary = compiled(capability, kernel, constants)
    registers, programs = limits[capability]
    print(f"{name} sm_{capability}a: {binary.registers} registers, {binary.shared} B shared, {binary.tmem} columns, "
          f"{ {word: binary.count(word) for word in MATRIX} }, {binary.programs(4)} programs")  # fmt: skip
    check_limits(binary)
    assert binary.registers <= registers
    assert binary.programs(4) >= programs
    assert binary.count(*MATRIX) > 0
    assert binary.count({90: "HGMMA", 100: "UTCHMMA"}[capability]) > 0
    assert "cp.async" in binary.ptx
    assert not re.findall(r"\b(?:atom|red)\.", binary.ptx)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, capability: int) -> None:
    kernel, constants, warps = OTHERS[name]
    binary = compiled(capability, kernel, constants, warps)
    check_limits(binary)
    assert binary.registers <= 72
    assert not re.findall(r"\b(?:atom|red)\.", binary.ptx)


@pytest.mark.parametrize(
    ("name", "capability", "pool_size", "channels"),
    [(name, 90, 3, 20) for name in PRODUCTS] + [("query_grad", 90, 1, 512), ("query_grad", 100, MOST_POOL_SIZE, 512)],
)
def test_other_geometries(name: str, capability: int, pool_size: int, channels: int) -> None:
    kernel, constants, _ = PRODUCTS[name]
    sizes = {"J": pool_size, "C": channels, "C_PADDED": triton.next_power_of_2(channels)}
    warps = grad_warps(pool_size) if name == "query_grad" else 4
    binary = compiled(capability, kernel, constants | sizes, warps)
    check_limits(binary)
    assert warps * binary.programs(warps) >= 8
    assert binary.count(*MATRIX) > 0


def test_one_binary_whatever_the_size_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows, budgets and samples, and of a piece of a call's rows, whose bounds begin on no multiple of 16 bytes."""
    built = binaries_of_calls(90, monkeypatch)
    channels = 32
    for begin, end, batch, budget in ((0, 60, 2, 8), (1, 40, 1, 7), (3, 4, 1, 1), (16, 32, 1, 16)):
        layout = PoolLayout.dense(60, pool_size=4, batch=batch)
        bounds = layout.bounds(torch.arange(60)).take(slice(begin, end))
        selection = torch.full((batch, 60, budget), -1, dtype=torch.int32)[:, begin:end]
        call = AttentionCall(layout, bounds, 0.3, True, 1 << 28)
        q, kv = torch.zeros(end - begin, batch, 8, channels).bfloat16(), torch.zeros(60, batch, channels).bfloat16()
        triton_attention.selection_faults(selection, call)
        saved = triton_attention.attend(q, kv, selection, call, torch.empty_like(q))
        sums = torch.zeros(60 * batch + 1, channels)
        triton_attention.attend_backward(q, kv, selection, call, saved, q, torch.empty_like(q), sums)
    kernels = ("fault_kernel", "attend_kernel", "query_grad_kernel", "slot_grad_kernel", "cell_kernel", "add_kernel")
    assert {name: len(binaries) for name, binaries in built.items()} == dict.fromkeys(kernels, 1)
    # Without gradients of queries another one.
    triton_attention.attend_backward(q, kv, selection, call, saved, q, None, sums)
    assert len(built["query_grad_kernel"]) == 2


def test_what_is_looked_for_is_found() -> None:
    """Tiles that are too large, and the compiler's own choice about subnormal numbers."""
    assert compiled(90, query_grad_kernel, ROWS | {"SLOTS": 32}).stack > 16
    trap = compiled(100, attend_kernel, ROWS | {"SLOTS": 64, "HEADS": 64}, 8)
    assert "trap" in trap.ptx
    assert trap.tmem > MOST_TMEM
    assert trap.count(*MATRIX) == 0
    flushed = OPTIONS | {"enable_reflect_ftz": True}
    types = {name: pointer(name) for name in attend_kernel.arg_names if name.endswith("_ptr")} | {"scale": "fp32"}
    assert ".ftz" in compile_for(90, attend_kernel, types, ROWS | {"SLOTS": SLOTS}, flushed | {"num_warps": 4}).ptx
