"""A kernel compiled for an architecture that is not here, and what its machine code says of it."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
# What a program may have on every architecture compiled for: shared memory in bytes, columns of tensor memory.
MOST_SHARED, MOST_TMEM = 232_448, 512
MATRIX = ("HGMMA", "UTCHMMA", "HMMA")


@dataclass(frozen=True)
class Binary:
    """A binary's resources, its PTX, and how often the machine code has what is asked for."""

    registers: int
    stack: int
    shared: int
    tmem: int
    ptx: str
    sass: str

    def count(self, *words: str) -> int:
        """Instructions of any of these names."""
        return len(re.findall(rf"\b({'|'.join(words)})\b", self.sass))

    def programs(self, warps: int, *, registers: int = 65_536, shared: int = MOST_SHARED, tmem: int = 512) -> int:
        """Programs that a multiprocessor holds at a time; each takes 1 KiB of shared memory more than it asks for."""
        of_tmem = tmem // self.tmem if self.tmem else 32
        return min(registers // (self.registers * 32 * warps), (shared + 1024) // (self.shared + 1024), of_tmem)


def compile_for(
    capability: int, kernel: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], options: Mapping[str, Any]
) -> Binary:
    """Compile as a call would, pointers on 16 bytes but those that the kernel exempts, and integers of 32 bits."""
    names, exempt = kernel.arg_names, {parameter.name for parameter in kernel.params if _exempt(parameter)}
    source = ASTSource(
        fn=kernel,
        signature={name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers if name not in exempt},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK"))  # type: ignore[index]
    return Binary(registers, stack, built.metadata.shared, built.metadata.tmem_size, built.asm["ptx"], sass)


def _exempt(parameter: Any) -> bool:
    return bool(parameter.do_not_specialize_on_alignment)


class Driver:
    """Stands where a GPU's driver would: calls are bound and compiled as there, and launched nowhere."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def binaries_of_calls(capability: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[int]]:
    """From here on nothing is launched: what calls compile, by the kernel's name."""
    built: dict[str, set[int]] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        binary = run(self, *args, **{**options, "warmup": True})
        built.setdefault(self.__name__, set()).add(id(binary))
        return binary

    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", Driver(capability))
    return built
