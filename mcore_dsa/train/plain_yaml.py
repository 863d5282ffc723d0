"""YAML as configurations need it: short, in UTF-8, and without aliases, which refer to themselves or multiply."""

from __future__ import annotations

import argparse
import os
import stat
from typing import Any

import yaml
from jsonargparse import ActionConfigFile, get_loader, set_dumper, set_loader  # type: ignore[attr-defined]

# Name of the way to parse, as jsonargparse knows it.
PLAIN_YAML = "plain_yaml"

# A configuration has 3 KiB.
_CHARACTERS = 2**18


class ConfigFile(ActionConfigFile):
    """`--config FILE`, where FILE is looked at before it is read."""

    def __call__(self, parser: Any, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Take the file's values.

        Raises: TypeError, with which jsonargparse refuses an option.
        """
        try:
            if os.path.lexists(values):
                _check(values)
            self.apply_config(parser, cfg, self.dest, values)
        except (argparse.ArgumentError, TypeError, yaml.YAMLError) as error:
            raise TypeError(f"{values}: {error}") from error


def _check(path: str) -> None:
    try:
        info = os.stat(path)
        # Before it is opened: a pipe would wait for a writer for good, and a device has no end.
        if not stat.S_ISREG(info.st_mode):
            raise TypeError(f"config is {path!r}; accepted is a regular file")
        if info.st_size > _CHARACTERS:
            raise TypeError(f"config is {path!r} of {info.st_size} bytes; accepted are at most {_CHARACTERS}")
        with open(path, "rb") as file:
            fields = _load(file.read(_CHARACTERS).decode())
    except OSError as error:
        raise TypeError(f"config is {path!r}; accepted is a file that can be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise TypeError(
            f"config is {path!r}; accepted is a file in UTF-8, which byte {byte:#04x} at {error.start} is not"
        ) from error
    if not isinstance(fields, dict):
        found = "nothing" if fields is None else f"a {type(fields).__name__}"
        raise TypeError(f"config is {found}; accepted are fields and their values")


def _load(text: str) -> Any:
    if len(text) > _CHARACTERS:
        raise yaml.YAMLError(f"the text has {len(text)} characters; accepted are at most {_CHARACTERS}")
    for token in yaml.scan(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if isinstance(token, yaml.AliasToken):
            raise yaml.YAMLError(
                f"line {token.start_mark.line + 1} has the alias *{token.value}; accepted is YAML that writes out "
                "every value"
            )
    try:
        _refuse_repeated(yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)), "", set())
        return get_loader("yaml")(text)
    except (ValueError, RecursionError) as error:
        # Of a number with more digits than Python reads, and of lists in lists.
        raise yaml.YAMLError(str(error)) from error


def _refuse_repeated(node: yaml.Node | None, name: str, seen: set[str]) -> None:
    """YAML's reader takes the last of two values of a field, `a.b: 1` and `a: {b: 1}` too, without a word."""
    children = node.value if isinstance(node, yaml.MappingNode) else []
    for key, value in children:
        field = f"{name}{key.value}"
        if field in seen:
            line = key.start_mark.line + 1
            raise yaml.YAMLError(f"line {line} has the field {field} once more; accepted is one value of each")
        seen.add(field)
        _refuse_repeated(value, f"{field}.", seen)


set_loader(PLAIN_YAML, _load, (yaml.YAMLError,))
set_dumper(PLAIN_YAML, lambda values: str(yaml.safe_dump(values, sort_keys=False)))
