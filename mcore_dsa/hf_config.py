"""A checkpoint's `config.json`, read once and strictly, and the JSON reader that its index and headers share."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

CONFIG_NAME = "config.json"
# What a file is that Git LFS has not fetched; https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
LFS_POINTER = b"version https://git-lfs"
LFS_HINT = "a Git LFS pointer, not the file itself; git lfs pull fetches it"
# 2**128 has 39 digits. Python refuses 4,301 with a word about its own settings.
_MOST_DIGITS = 40
# The published configuration has 4. Python's own limit is met in the parser, or later in whoever walks the value.
_MOST_LEVELS = 64


class HfConfig(NamedTuple):
    """A configuration as it was read.

    Attributes:
        source: what messages call its text part.
        top: all of it.
        text: the part that describes the text model; `top` itself where nothing is nested.
    """

    source: str
    top: Mapping[str, Any]
    text: Mapping[str, Any]


def read_hf_config(config: object) -> HfConfig:
    """Read a model configuration.

    Args:
        config: a mapping, a transformers configuration object, the path of a `config.json` or of the folder that holds
            one, or what this function gave before.

    Raises: TypeError for anything else; OSError for a path that cannot be read; ValueError for a file that holds no
        JSON object, and for a `text_config` that is none.
    """
    if isinstance(config, HfConfig):
        return config
    if isinstance(config, str | os.PathLike):
        source, top = _read_file(Path(config))
    else:
        converted = _as_mapping(config)
        if converted is None:
            accepted = "a mapping, a configuration object with to_dict(), or a path"
            raise TypeError(f"config is {shown(config)}; accepted is {accepted}")
        source, top = "config", converted
    if "text_config" not in top:
        return HfConfig(source, top, top)
    text = _as_mapping(top["text_config"])
    if text is None:
        raise ValueError(f"text_config of {source} is {shown(top['text_config'])}; accepted is an object of fields")
    return HfConfig(f"text_config of {source}", top, text)


def parse_json(data: bytes, *, encoding: str = "utf-8-sig") -> Any:
    """JSON that means one thing.

    Raises: ValueError for what is not JSON, and for an object with a key twice, a number of more than 40 digits, or
        deeper nesting than Python parses.
    """
    if data.startswith(LFS_POINTER):
        raise ValueError(f"it is {LFS_HINT}")
    try:
        return json.loads(data.decode(encoding), object_pairs_hook=_unique, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def shown(value: object) -> str:
    """The value as a message shows it: short, whatever it is."""
    return _SHORT.repr(value)


class _Short(reprlib.Repr):
    def repr_int(self, value: int, level: int) -> str:
        # Python refuses to spell an integer of more than 4,300 digits.
        return repr(value) if value.bit_length() <= 128 else f"an integer of {value.bit_length()} bits"


_SHORT = _Short(maxlevel=3, maxstring=80, maxother=80, maxlist=8, maxtuple=12, maxdict=8)


def _read_file(path: Path) -> tuple[str, Mapping[str, Any]]:
    if path.is_dir():
        path = path / CONFIG_NAME
        # A pipe would be waited for. One that the caller names, as in <(...), is read.
        if path.exists() and not path.is_file():
            raise ValueError(f"config is {path}; accepted is a regular file")
    try:
        loaded = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"config is {path}; accepted is a file of JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"config is {path}; accepted is a JSON object, not {type(loaded).__name__}")
    if _levels_exceed(loaded, _MOST_LEVELS):
        raise ValueError(f"config is {path}; accepted are at most {_MOST_LEVELS} levels of nesting")
    return str(path), loaded


def _levels_exceed(value: object, most: int) -> bool:
    level = [value]
    for _ in range(most):
        inner: list[object] = []
        for each in level:
            if isinstance(each, dict):
                inner += each.values()
            elif isinstance(each, list):
                inner += each
        level = inner
    return bool(level)


def _as_mapping(value: object) -> Mapping[str, Any] | None:
    if isinstance(value, Mapping):
        return value
    to_dict = getattr(value, "to_dict", None)
    converted = to_dict() if callable(to_dict) else None
    return converted if isinstance(converted, Mapping) else None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice[:200]} stands there twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits stands there; accepted are at most {_MOST_DIGITS}")
    return int(digits)
