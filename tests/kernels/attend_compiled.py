"""Sparse attention compiled ahead of time, in a process of its own (`test_attend_triton.py`).

For Hopper and Blackwell, in the published geometry: what a compiler does that neither the interpreter nor
`triton.compile` complains of. Bounds are those of the table of 2026-12-03 in benchmarks/LOG.md: registers decide how
many programs a multiprocessor holds.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mcore_dsa.kernels.attend_cells import PART, STEP, add_parts_kernel, latent_grad_kernel
from mcore_dsa.kernels.attend_rows import GRAD_SLOTS, HEADS, SLOTS, attend_kernel, query_grad_kernel
from mcore_dsa.kernels.inverse_lists import COLUMNS, collect_kernel, count_kernel
from mcore_dsa.kernels.items import fault_kernel

PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
FLOATS = {"norm_ptr", "delta_ptr", "sum_ptr"}
BF16 = {"q_ptr", "kv_ptr", "out_ptr", "out_grad_ptr", "q_grad_ptr", "kv_grad_ptr"}
INT32 = {"selection_ptr", "item_ptr", "count_ptr", "key_ptr", "entry_ptr"}

SIZES = {"J": 4, "C": 512, "C_PADDED": 512}
PRECISION = {"OPERAND": tl.bfloat16, "SPLIT": True}
ROWS = SIZES | PRECISION | {"TAIL": True, "HEADS": HEADS}
CELLS = SIZES | {"J_PADDED": 8}
LISTS = {"J": 4, "TAIL": True, "COLUMNS": COLUMNS}


@dataclass(frozen=True)
class Compiled:
    registers: int
    spilled: int
    shared: int
    tensor_memory: int
    products: int
    ptx: str


def type_of(name: str) -> str:
    if name == "scale":
        return "fp32"
    if not name.endswith("_ptr"):
        return "i32"
    kinds = {"*bf16": BF16, "*fp32": FLOATS, "*i32": INT32, "*i8": {"fault_ptr"}}
    return next((kind for kind, names in kinds.items() if name in names), "*i64")


def compiled(kernel: Any, constants: dict[str, Any], capability: int, warps: int, folder: Path) -> Compiled:
    """As `items.launch` compiles it, every pointer on 16 bytes."""
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else type_of(name) for name in names},
        constexprs={(i,): constants[name] for i, name in enumerate(names) if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name.endswith("_ptr")},
    )
    options = {"num_warps": warps, "num_stages": 2, "enable_reflect_ftz": False}
    result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    (folder / "kernel.cubin").write_bytes(result.asm["cubin"])
    (folder / "kernel.ptx").write_text(result.asm["ptx"], encoding="utf-8")
    usage = output(PROGRAMS / "cuobjdump", "-res-usage", folder / "kernel.cubin")
    code = output(PROGRAMS / "cuobjdump", "-sass", folder / "kernel.cubin")
    assembler = PROGRAMS / ("ptxas-blackwell" if capability >= 100 else "ptxas")
    said = output(assembler, "-v", f"--gpu-name=sm_{capability}a", folder / "kernel.ptx", "-o", os.devnull)
    return Compiled(
        int(re.search(r"REG:(\d+)", usage)[1]),
        int(re.search(r"(\d+) bytes spill stores", said)[1]),
        result.metadata.shared,
        getattr(result.metadata, "tmem_size", None) or 0,
        len(re.findall(r"\b(?:HGMMA|UTCHMMA|HMMA)\b", code)),
        result.asm["ptx"],
    )


def output(*command: Any) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


# Kernel, constants, warps, least products, registers on sm_90a and on sm_100a.
SHIPPED = {
    "attend": (attend_kernel, ROWS | {"SLOTS": SLOTS}, 4, 1, (200, 152)),
    "query_grad": (query_grad_kernel, ROWS | {"SLOTS": GRAD_SLOTS}, 4, 1, (192, 192)),
    "latent_grad": (latent_grad_kernel, CELLS | PRECISION | {"PART": PART, "STEP": STEP}, 4, 1, (168, 170)),
    "add_parts": (add_parts_kernel, CELLS, 4, 0, (64, 64)),
    "count": (count_kernel, LISTS, 1, 0, (64, 64)),
    "collect, count": (collect_kernel, LISTS | {"STORE": False}, 1, 0, (64, 64)),
    "collect, store": (collect_kernel, LISTS | {"STORE": True}, 1, 0, (64, 64)),
    "faults": (fault_kernel, {"COLUMNS": 128}, 1, 0, (64, 64)),
}


@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize(("place", "capability"), [(0, 90), (1, 100)], ids=["sm_90a", "sm_100a"])
def test_fits_the_device(name: str, place: int, capability: int, tmp_path: Path) -> None:
    kernel, constants, warps, products, registers = SHIPPED[name]
    found = compiled(kernel, constants, capability, warps, tmp_path)
    print(f"{name} sm_{capability}a: {found.registers} registers, {found.spilled} spilled, {found.shared} shared, "
          f"{found.tensor_memory} tensor memory, {found.products} products")  # fmt: skip
    assert found.registers <= registers[place]
    assert found.spilled <= 16
    assert found.shared <= 232448
    assert found.tensor_memory <= 512
    assert found.products >= products
    assert "trap" not in found.ptx
    assert ".ftz" not in found.ptx
    # The one atomic operation there is counts.
    atomics = re.findall(r"\b(?:atom|red)\.\S*", found.ptx)
    assert all(".u32" in operation or ".s32" in operation for operation in atomics)
    assert bool(atomics) == (name == "count")


@pytest.mark.parametrize("name", ["attend", "query_grad", "latent_grad"])
@pytest.mark.parametrize("channels", [20, 64])
def test_other_geometries_compile(name: str, channels: int, tmp_path: Path) -> None:
    kernel, constants, warps, products, _ = SHIPPED[name]
    padded = triton.next_power_of_2(channels)
    found = compiled(kernel, constants | {"C": channels, "C_PADDED": padded, "J": 3}, 90, warps, tmp_path)
    assert found.products >= products
    assert found.spilled <= 16
    assert "trap" not in found.ptx
