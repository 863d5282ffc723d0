"""Triton's interpreter, faster, and as strict as it can be made about memory.

It looks the whole language up anew for every function that a kernel calls; here it does so once, which saves two fifths
of its time (M). What it puts in the language's place stays there until the kernel has run. For each value it makes a
table of numpy's types: a tenth.

It follows any pointer, so that a lane outside of its tensor reads or spoils whatever is mapped there. Here that is an
error: every load and store lies in a tensor of the call. And it runs programs one after the other, so that what one
writes into the lines of the next is written over: under `backwards` they run in the other order.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_order = {"backwards": False}
_patched: set[str] = set()
# Of what a kernel may touch, ascending; in front of it nothing, so that every address has a beginning before it.
_begins: list[int] = [0]
_ends: list[int] = [0]


@contextmanager
def backwards() -> Iterator[None]:
    """Every launch's last program first."""
    _order["backwards"] = True
    try:
        yield
    finally:
        _order["backwards"] = False


def install() -> None:
    builder = interpreter.InterpreterBuilder
    patch, run, place = interpreter._patch_lang, interpreter.GridExecutor.__call__, builder.set_grid_idx
    load, store = builder.create_masked_load, builder.create_masked_store

    def patch_once(function: Any) -> Any:
        modules = {value.__name__ for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= _patched:
            return interpreter._LangPatchScope()
        _patched.update(modules)
        return patch(function)

    def run_anew(self: Any, *arguments: Any, **options: Any) -> None:
        _patched.clear()
        _allow([x for x in (*arguments, *options.values()) if isinstance(x, torch.Tensor) and x.numel()])
        run(self, *arguments, **options)

    def turn(self: Any, x: int, y: int, z: int) -> None:
        place(self, self.grid_dim[0] - 1 - x if _order["backwards"] else x, y, z)

    numpy_type, known = interpreter._get_np_dtype, dict[str, Any]()

    def numpy_type_once(kind: Any) -> Any:
        # Of a block it is that of its elements.
        name = kind.scalar.name
        if name not in known:
            known[name] = numpy_type(kind)
        return known[name]

    def load_inside(self: Any, pointer: Any, mask: Any, *rest: Any) -> Any:
        _check(pointer, mask)
        return load(self, pointer, mask, *rest)

    def store_inside(self: Any, pointer: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _check(pointer, mask)
        return store(self, pointer, value, mask, *rest)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, run_anew
    interpreter._get_np_dtype = numpy_type_once
    builder.set_grid_idx, builder.create_masked_load, builder.create_masked_store = turn, load_inside, store_inside


def _allow(tensors: list[torch.Tensor]) -> None:
    """From here on the memory of these, those that overlap as one."""
    _begins[:], _ends[:] = [0], [0]
    for begin, end in sorted((x.data_ptr(), x.data_ptr() + _span(x)) for x in tensors):
        if begin < _ends[-1]:
            _ends[-1] = max(end, _ends[-1])
        else:
            _begins.append(begin)
            _ends.append(end)


def _span(x: torch.Tensor) -> int:
    return x.element_size() * (1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)))


def _check(pointer: Any, mask: Any) -> None:
    size = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
    # Most often what is masked lies inside as well.
    if _is_inside(pointer.data, size):
        return
    address = pointer.data[mask.data]
    if not address.size or _is_inside(address, size):
        return
    at = np.searchsorted(np.array(_begins, dtype=np.uint64), address, side="right") - 1
    if (address + np.uint64(size) > np.array(_ends, dtype=np.uint64)[at]).any():
        raise IndexError("a lane is outside of the tensors of its kernel's call")


def _is_inside(address: Any, size: int) -> bool:
    """Whether all of them lie in one tensor."""
    low = int(address.min())
    return int(address.max()) + size <= _ends[bisect_right(_begins, low) - 1]
