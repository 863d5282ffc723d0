"""Headers of safetensors files and their index, read without the library so that every fault gets a name.

The library refuses a broken file as a whole; a verifier has to say which tensors it costs. Format: 8 bytes of length
(little-endian), that many bytes of JSON, the data; source https://github.com/huggingface/safetensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from mcore_dsa.hf_config import LFS_HINT, LFS_POINTER, parse_json, shown

# The one file of a checkpoint that is not divided, and the index of one that is.
MODEL_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
MODEL_INDEX = f"model{INDEX_SUFFIX}"
_LENGTH_BYTES = 8
_HEADER_LIMIT = 100_000_000  # bytes of JSON, the library's own limit
_ELEMENT_LIMIT = 2**64  # the library's, met on the way to a product of 0 too
_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "BOOL": 8, "C64": 64} | {
    name: bits
    for bits, names in {
        8: ("U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
        16: ("U16", "I16", "F16", "BF16"),
        32: ("U32", "I32", "F32"),
        64: ("U64", "I64", "F64"),
    }.items()
    for name in names
}


class FaultKind(StrEnum):
    MISSING = "missing"
    UNEXPECTED = "unexpected"
    SHAPE = "wrong shape"
    DTYPE = "wrong dtype"
    SCALE_MISSING = "missing scale"
    SCALE_SHAPE = "ill-shaped scale"
    NOT_DSA = "layer is not DSA"
    DUPLICATE = "duplicate"
    TRUNCATED = "truncated"
    UNREADABLE = "unreadable"
    MISSING_FILE = "missing file"
    INDEX = "index"
    PREFIX = "prefix"
    NOT_FINITE = "not finite"
    ZEROS = "all zeros"
    SCALE_ZERO = "scale of zero"


class Fault(NamedTuple):
    """One thing that is wrong; `tensor` is a full name, or empty where a file as a whole is meant."""

    kind: FaultKind
    tensor: str
    expected: str
    found: str
    file: str


class StoredTensor(NamedTuple):
    """Where a tensor lies: bytes `[start, stop)` of `file`, of which the first `size` exist."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    size: int


class Header(NamedTuple):
    """What a file's header says."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


_NO_HEADER = Header({}, {})


@dataclass(frozen=True)
class Listing:
    """What the headers of a checkpoint's files say.

    Attributes:
        files: the safetensors files.
        index: file names by tensor, as the index has them; empty without one.
        tensors: where each tensor lies, by full name; the first place of a duplicate.
        faults: what is wrong with the files as such.
    """

    files: tuple[Path, ...]
    index: Mapping[str, str]
    tensors: Mapping[str, StoredTensor]
    faults: tuple[Fault, ...]


def list_tensors(path: Path) -> Listing:
    """Read the headers of a `.safetensors` file, of the files of an index, or of those in a folder.

    A folder with neither index nor `model.safetensors` counts with all its files: with one of the two, as everybody
    reads it, without what lies beside, such as a `consolidated.safetensors` of the same tensors.

    Raises: OSError for a `path` that does not exist; ValueError for one that is none of the above.
    """
    path.stat()
    faults: list[Fault] = []
    index_path, files = _locate(path)
    index = {} if index_path is None else _read_index(index_path, faults)
    if index:
        files = [path.parent / name if path.is_file() else path / name for name in sorted(set(index.values()))]
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        for name, stored in read_header(file, faults).tensors.items():
            first = tensors.setdefault(name, stored)
            if first is not stored:
                found = f"it is in {first.file.name} too"
                faults.append(Fault(FaultKind.DUPLICATE, name, "one place", found, file.name))
    return Listing(tuple(files), index, tensors, tuple(faults))


def _locate(path: Path) -> tuple[Path | None, list[Path]]:
    """The index, if there is one, and the files there are without it."""
    if path.name.endswith(INDEX_SUFFIX):
        return path, []
    if path.is_file() and path.suffix == ".safetensors":
        return None, [path]
    if not path.is_dir():
        raise ValueError(f"path is {path}; accepted is a .safetensors file, a *{INDEX_SUFFIX} or a folder")
    names = sorted(child for child in path.iterdir() if not child.name.startswith("."))
    indexes = _preferred([child for child in names if child.name.endswith(INDEX_SUFFIX)], MODEL_INDEX)
    files = _preferred([child for child in names if child.suffix == ".safetensors"], MODEL_FILE)
    if len(indexes) > 1:
        found = ", ".join(child.name for child in indexes)
        raise ValueError(f"path is {path}, with {found}; accepted is a folder with one index, or a {MODEL_INDEX}")
    if not indexes and not files:
        raise ValueError(f"path is {path}; accepted is a folder with a .safetensors file or a *{INDEX_SUFFIX}")
    return (indexes[0] if indexes else None), files


def _preferred(files: list[Path], name: str) -> list[Path]:
    return [file for file in files if file.name == name] or files


def _read_index(path: Path, faults: list[Fault]) -> dict[str, str]:
    if not path.is_file():
        faults.append(Fault(FaultKind.UNREADABLE, "", "a regular file", "none", path.name))
        return {}
    try:
        index = parse_json(path.read_bytes())
    except ValueError as error:
        faults.append(Fault(FaultKind.UNREADABLE, "", "a JSON object", str(error), path.name))
        return {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        faults.append(Fault(FaultKind.UNREADABLE, "", "an object under weight_map", shown(weight_map), path.name))
        return {}
    usable = {}
    for name, file in weight_map.items():
        if isinstance(file, str) and file == os.path.basename(file) and file not in ("", ".", ".."):
            usable[name] = file
        else:
            faults.append(Fault(FaultKind.INDEX, name, "a file name beside the index", shown(file), path.name))
    return usable


def read_header(file: Path, faults: list[Fault]) -> Header:
    """The header of a file, as far as it is sound; what is wrong with the file is appended to `faults`."""

    def fault(kind: FaultKind, expected: str, found: str, tensor: str = "") -> Header:
        faults.append(Fault(kind, tensor, expected, found, file.name))
        return _NO_HEADER

    try:
        # Opening a pipe would wait for whoever writes to it.
        if file.exists() and not file.is_file():
            return fault(FaultKind.UNREADABLE, "a regular file", "a folder" if file.is_dir() else "a pipe or a device")
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(_LENGTH_BYTES)
            length = int.from_bytes(first, "little")
            data = _LENGTH_BYTES + length
            if LFS_POINTER.startswith(first) and len(first) == _LENGTH_BYTES:
                return fault(FaultKind.UNREADABLE, "a safetensors file", LFS_HINT)
            if size < _LENGTH_BYTES or (data > size and length <= _HEADER_LIMIT):
                return fault(FaultKind.TRUNCATED, f"a header of {data} bytes", f"a file of {size} bytes")
            if length > _HEADER_LIMIT:
                return fault(FaultKind.UNREADABLE, "a safetensors file", f"a file that begins with {first!r}")
            header = parse_json(stream.read(length), encoding="utf-8")
    except FileNotFoundError:
        return fault(FaultKind.MISSING_FILE, "a file", "none")
    except OSError as error:
        return fault(FaultKind.UNREADABLE, "a readable file", error.strerror or str(error))
    except ValueError as error:
        return fault(FaultKind.UNREADABLE, "a JSON header", str(error))
    if not isinstance(header, dict):
        return fault(FaultKind.UNREADABLE, "a JSON object as header", type(header).__name__)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        fault(FaultKind.UNREADABLE, "strings as metadata", shown(metadata))
        metadata = {}
    tensors = {}
    for name, entry in header.items():
        stored = _stored(file, entry, data, size)
        if stored is None:
            fault(FaultKind.UNREADABLE, "dtype, shape and as many bytes", shown(entry), name)
        else:
            tensors[name] = stored
    if len(tensors) == len(header):
        faults.extend(_extent_faults(file, tensors, data, size))
    return Header(tensors, metadata)


def _stored(file: Path, entry: Any, data: int, size: int) -> StoredTensor | None:
    """None where the entry is ill-formed or its bytes do not fit its dtype and shape."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        return None
    start, stop = offsets
    bits = _BITS.get(dtype)
    elements = 1
    for extent in shape:
        elements *= extent
        if elements >= _ELEMENT_LIMIT:
            return None
    if stop < start or (bits is not None and elements * bits != 8 * (stop - start)):
        return None
    return StoredTensor(file, dtype, tuple(shape), data + start, data + stop, size)


def _are_counts(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)


def _extent_faults(file: Path, tensors: Mapping[str, StoredTensor], data: int, size: int) -> Iterator[Fault]:
    """Tensors must fill the data without gap or overlap, and the file must end with them."""
    end = data
    for name, stored in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if stored.start != end:
            found = f"byte {stored.start - data}"
            yield Fault(FaultKind.UNREADABLE, name, f"data from byte {end - data} on", found, file.name)
        end = stored.stop
    if end > size:
        yield Fault(FaultKind.TRUNCATED, "", f"{end} bytes", f"{size} bytes", file.name)
    elif end < size:
        yield Fault(FaultKind.UNREADABLE, "", f"{end} bytes", f"{size} bytes", file.name)
