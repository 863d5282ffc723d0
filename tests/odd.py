"""What no caller should pass and some caller will: odd values, and sound ones with something changed in them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

# Sizes between these two ask for memory that a sound caller may ask for too.
SMALL, HUGE = 300, 2**31 + 1

INTEGERS = (-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, SMALL)
EXTREMES = (-(2**63), -(2**31), HUGE, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 10**100)
WORDS = ("", " ", "0", "1", "-1", "x", "null", "1e3", "nan", "\0", "\ud800", "é", "off", "balanced", "a/b", "../x")
# Of JSON types alone, so that they can be written to a file.
_JSON: tuple[Any, ...] = (None, True, False, *INTEGERS, *EXTREMES, *WORDS, 0.5, -0.0, 1e-320, 1e308)
_JSON += (math.nan, math.inf, -math.inf, "x" * 5000, [], {}, [[]], [None], {"": 0}, [1, 2], ["full"], [HUGE])
_OBJECTS: tuple[Any, ...] = (b"x", (), (1,), {1}, range(3), object(), object, 1j, torch.float32, torch.tensor(3))

json_values = st.sampled_from(_JSON).map(copy.deepcopy)
integers = st.sampled_from((*INTEGERS, *EXTREMES))
values = st.one_of(json_values, st.sampled_from(_OBJECTS))

_DTYPES = (torch.int32, torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.float64, torch.uint8)
_DTYPES += (torch.float8_e4m3fn, torch.complex64)
_SHAPES = st.lists(st.sampled_from((0, 1, 1, 2, 2, 3, 4, 5, 8, 12)), max_size=5).filter(lambda s: math.prod(s) <= 4096)

_WHOLE = (-1, 0, 1, 2, 3, 5, 2**31 - 1, -(2**31), 2**62, -(2**63))
_BROKEN = (-1.0, 0.0, 1.0, 0.5, math.nan, math.inf, -math.inf)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype, shape, and layout in memory; integers small and extreme, floats special ones too."""
    shape, dtype = draw(_SHAPES), draw(st.sampled_from(_DTYPES))
    whole = not (dtype.is_floating_point or dtype.is_complex)
    numbers = _WHOLE if whole else _BROKEN
    pool = draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=6))
    count = math.prod(shape)
    flat = torch.tensor((pool * count)[:count], dtype=torch.int64 if whole else torch.float64)
    tensor = flat.to(dtype).view(shape)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


@st.composite
def changed_tensor(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with some of its numbers changed, or its shape, or its dtype."""
    what = draw(st.sampled_from(("numbers", "numbers", "slice", "dtype", "extra", "other")))
    if what == "other":
        return draw(tensors())
    if what == "dtype":
        return tensor.to(draw(st.sampled_from(_DTYPES)))
    if what == "extra":
        return tensor.unsqueeze(draw(st.integers(0, tensor.ndim)))
    if what == "slice" and tensor.ndim:
        dim = draw(st.integers(0, tensor.ndim - 1))
        return tensor.narrow(dim, 0, draw(st.integers(0, tensor.shape[dim])))
    found = tensor.clone(memory_format=torch.contiguous_format)
    flat = found.view(-1)
    for _ in range(draw(st.integers(1, 3)) if flat.numel() else 0):
        place = draw(st.integers(0, flat.numel() - 1))
        if found.is_floating_point() or found.is_complex():
            flat[place] = draw(st.sampled_from((math.nan, math.inf, -math.inf, 0.0, 1e30)))
        elif found.dtype == torch.bool:
            flat[place] = not flat[place]
        else:
            bounds = torch.iinfo(found.dtype)
            flat[place] = draw(st.sampled_from((-2, -1, 0, 1, 2, 5, 9, 100, bounds.min, bounds.max)))
    return found


@st.composite
def changed_arguments(draw: st.DrawFn, arguments: dict[str, Any], most: int = 2) -> dict[str, Any]:
    """A sound call's arguments, some of them changed or replaced, none of them left out."""
    found = dict(arguments)
    for name in draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=most, unique=True)):
        if isinstance(found[name], torch.Tensor) and draw(st.integers(0, 3)):
            found[name] = draw(changed_tensor(found[name]))
        elif isinstance(found[name], int) and draw(st.integers(0, 2)):
            found[name] = draw(integers)
        else:
            found[name] = draw(st.one_of(values, tensors()))
    return found


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every container and key inside a tree of dictionaries and lists."""
    found = []
    pending = [tree]
    while pending:
        node = pending.pop()
        keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in list(keys):
            found.append((node, key))
            pending.append(node[key])
    return found


@st.composite
def changed_tree(draw: st.DrawFn, tree: Any, odd: st.SearchStrategy[Any] = json_values, most: int = 3) -> Any:
    """A tree of dictionaries and lists with nodes replaced, dropped, added, exchanged, nudged or nested."""
    found = copy.deepcopy(tree)
    for _ in range(draw(st.integers(0, most))):
        places = _places(found)
        if not places:
            break
        node, key = draw(st.sampled_from(places))
        what = draw(st.sampled_from(("replace", "replace", "drop", "add", "exchange", "nudge", "nest")))
        if what == "drop":
            del node[key]
        elif what == "add" and isinstance(node, dict):
            node[draw(st.sampled_from(WORDS))] = draw(odd)
        elif what == "add":
            node.insert(key, draw(odd))
        elif what == "exchange":
            other, place = draw(st.sampled_from(places))
            node[key] = copy.deepcopy(other[place])
        elif what == "nudge" and isinstance(node[key], int | float):
            change: Callable[[Any], Any] = draw(st.sampled_from((lambda x: x + 1, lambda x: -x, float, str, bool)))
            node[key] = change(node[key])
        elif what == "nest":
            node[key] = draw(st.sampled_from(([node[key]], {"x": node[key]})))
        else:
            node[key] = draw(odd)
    return found


@st.composite
def changed_bytes(draw: st.DrawFn, data: bytes, most: int = 3) -> bytes:
    """Bytes flipped, cut, doubled, inserted, or read as another length."""
    found = bytearray(data)
    for _ in range(draw(st.integers(0, most))):
        # Near the front, where lengths and structure stand, as often as anywhere.
        span = draw(st.sampled_from((8, 64, len(found))))
        start = draw(st.integers(0, min(span, len(found))))
        stop = min(len(found), start + draw(st.sampled_from((1, 1, 2, 8, 40))))
        what = draw(st.sampled_from(("flip", "cut", "double", "insert", "length", "end")))
        if what == "flip" and start < stop:
            found[start] ^= 1 << draw(st.integers(0, 7))
        elif what == "cut":
            del found[start:stop]
        elif what == "double":
            found[start:start] = found[start:stop]
        elif what == "length":
            found[start : start + 8] = draw(st.sampled_from((0, 1, 2**31, 2**63, 2**64 - 1))).to_bytes(8, "little")
        elif what == "end":
            del found[draw(st.integers(0, len(found))) :]
        else:
            odd = (
                b"\0",
                b"\xff",
                b"\xef\xbb\xbf",
                b"[" * 3000,
                b"9" * 5000,
                b'"',
                b"{",
                b"}",
                b",",
                b"-",
                b"NaN",
                b"1e999",
            )
            found[start:start] = draw(st.sampled_from(odd))
    return bytes(found)
