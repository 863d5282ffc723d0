"""What the environment asks for: the only place of the package that reads `os.environ`.

A value that cannot be read does not raise here. Under a process group every rank has to raise together, or the ones
that could read theirs hang in the next collective: the fault is kept, and travels with the values into the agreement.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

# Ways to give the indexer's query rows to the ranks of a tensor-parallel group; "off" gives every row to every rank.
Partition = Literal["off", "contiguous", "zigzag", "balanced"]
# Implementations of compression, selection and attention; "auto" takes the fastest that keeps the contract here.
Kernels = Literal["auto", "torch", "triton"]
# What attention of a tensor-parallel rank is cut by: its own heads of all rows, or its own rows with all heads.
AttendShard = Literal["heads", "rows"]

PARTITION_VARIABLE = "SKYRL_DSA_INDEXER_TP_SHARD"
SCORE_BYTES_VARIABLE = "MCORE_DSA_SCORE_BYTES"
ATTEND_BYTES_VARIABLE = "MCORE_DSA_ATTEND_BYTES"
ATTEND_SHARD_VARIABLE = "MCORE_DSA_ATTEND_SHARD"
OVERLAP_VARIABLE = "MCORE_DSA_OVERLAP"
KERNELS_VARIABLE = "MCORE_DSA_KERNELS"
STORE_VARIABLE = "MCORE_DSA_RECOMPUTE_STORE"
STORE_BYTES_VARIABLE = "MCORE_DSA_RECOMPUTE_STORE_BYTES"
DRIFT_VARIABLE = "MCORE_DSA_DRIFT_EVERY"
VERIFY_VARIABLE = "MCORE_DSA_VERIFY"

# Of scores in flight, and of either pass of attention.
DEFAULT_BYTES = 256 * 2**20
# Of a device's memory, the greatest power of two below a sixteenth is the default where that is more: scores in blocks
# of 8 GiB in place of 256 MiB take a quarter of the time on a GPU (estimated from launches).
_PART_OF_MEMORY = 16
# Eleven layers of 524,288 rows over 8 ranks at a budget of 512 take 1.4 GiB, times the micro-batches in flight.
DEFAULT_STORE_BYTES = 8 * 2**30
DEFAULT_DRIFT_EVERY = 100

_PARTITION_WORDS: dict[str, Partition] = {
    **dict.fromkeys(("0", "false"), "off"),
    **dict.fromkeys(("1", "true", "on"), "contiguous"),
    **{partition: partition for partition in get_args(Partition)},
}
_PARTITIONS_ACCEPTED = "unset, empty, 0, false or off; 1, true or on; contiguous, zigzag, balanced"

_KERNELS_WORDS: dict[str, Kernels] = {kernels: kernels for kernels in get_args(Kernels)}

_ATTEND_SHARD_WORDS: dict[str, AttendShard] = {shard: shard for shard in get_args(AttendShard)}

_SWITCH = {"1": True, "0": False}

# Rows that `on` verifies in a call.
_VERIFY_WORDS = {"off": 0, "on": 16}
_COUNT_ACCEPTED = "whole numbers below 2**31, 0 for never"
_VERIFY_ACCEPTED = "off, on, and whole numbers of rows below 2**31"

_BYTE_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}
BYTES_ACCEPTED = "positive whole numbers of bytes below 2**63, as 67108864, or with a unit: B, KiB, MiB or GiB"


@dataclass(frozen=True, kw_only=True)
class Setting[T]:
    """One setting as it takes effect.

    Attributes:
        name: the environment variable.
        value: the value in effect; the default where the variable is unset, empty or refused.
        raw: what the variable holds, `None` where it is unset.
        reason: where `value` comes from, for the log.
        fault: `raw` and what is accepted in its place, where it is refused; else empty.
    """

    name: str
    value: T
    raw: str | None
    reason: str
    fault: str = ""

    @property
    def shown(self) -> str:
        """The value for people."""
        if isinstance(self.value, bool):
            return "on" if self.value else "off"
        if self.name == VERIFY_VARIABLE and not self.value:
            return "off"
        if isinstance(self.value, int) and self.name.endswith("BYTES"):
            return bytes_text(self.value)
        return str(self.value)

    def __str__(self) -> str:
        """The variable, its value and whether it was set, for a line of the log."""
        given = "default" if self.raw is None or not self.raw.strip() else f"set to {self.raw!r}"
        return f"{self.name} {self.shown} ({given})"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, as one rank reads them.

    Attributes:
        partition: how the indexer's query rows are cut over the tensor-parallel group; "off" leaves every row on
            every rank.
        score_bytes: bytes that scores in flight may take.
        attend_bytes: bytes that either pass of the sparse attention may take beyond what its caller holds.
        attend_shard: what attention is cut by over the tensor-parallel group.
        overlap: gather the selections of finished rows while the next are scored.
        kernels: which implementation compresses, selects and attends.
        store: keep what a forward selected for its recomputation.
        store_bytes: bytes that kept selections of one rank may take; where they could take more, none is kept.
        drift_every: forwards of a layer from one comparison of what its ranks hold to the next, 0 for none.
        verify: rows that each forward of a layer selects again on another rank, 0 for none.
    """

    partition: Setting[Partition]
    score_bytes: Setting[int]
    attend_bytes: Setting[int]
    attend_shard: Setting[AttendShard]
    overlap: Setting[bool]
    kernels: Setting[Kernels]
    store: Setting[bool]
    store_bytes: Setting[int]
    drift_every: Setting[int]
    verify: Setting[int]

    @property
    def faults(self) -> tuple[str, ...]:
        """One line for each variable that is refused, naming it, its value and what is accepted."""
        return tuple(f"{setting.name} is {setting.fault}" for setting in self if setting.fault)

    def raise_faults(self) -> None:
        """Raise a `ValueError` with every fault, if there is any."""
        if self.faults:
            raise ValueError("; ".join(self.faults))

    def describe(self) -> dict[str, str]:
        """The variables and what each comes to, as text that is equal on two ranks if and only if they agree.

        Two spellings of one value are equal. A refused value stands as it was given, so that ranks which refuse
        different values, or of which only one refuses, differ.
        """
        return {setting.name: setting.fault or str(setting.value) for setting in self}

    def __iter__(self) -> Iterator[Setting[Any]]:
        return (getattr(self, field.name) for field in fields(self))


def read_settings(environ: Mapping[str, str] | None = None, *, device_bytes: int = 0) -> Settings:
    """Read every setting from `environ`, by default the process's environment.

    A bad value never raises: see `Settings.faults` and `Settings.raise_faults`.

    Args:
        device_bytes: memory of the device that is computed on, where it has its own: default budgets follow it.
    """
    environ = os.environ if environ is None else environ
    default = default_bytes(device_bytes)
    return Settings(
        partition=_read(environ, PARTITION_VARIABLE, _PARTITION_WORDS.__getitem__, _PARTITIONS_ACCEPTED, "off"),
        score_bytes=_read(environ, SCORE_BYTES_VARIABLE, parse_bytes, BYTES_ACCEPTED, default),
        attend_bytes=_read(environ, ATTEND_BYTES_VARIABLE, parse_bytes, BYTES_ACCEPTED, default),
        attend_shard=_read(
            environ,
            ATTEND_SHARD_VARIABLE,
            _ATTEND_SHARD_WORDS.__getitem__,
            " and ".join(_ATTEND_SHARD_WORDS),
            "heads",
        ),
        overlap=_read(environ, OVERLAP_VARIABLE, _SWITCH.__getitem__, "1 and 0", True),
        kernels=_read(environ, KERNELS_VARIABLE, _KERNELS_WORDS.__getitem__, "auto, torch and triton", "auto"),
        store=_read(environ, STORE_VARIABLE, _SWITCH.__getitem__, "1 and 0", True),
        store_bytes=_read(environ, STORE_BYTES_VARIABLE, parse_bytes, BYTES_ACCEPTED, DEFAULT_STORE_BYTES),
        drift_every=_read(environ, DRIFT_VARIABLE, _parse_count, _COUNT_ACCEPTED, DEFAULT_DRIFT_EVERY),
        verify=_read(environ, VERIFY_VARIABLE, _parse_verify, _VERIFY_ACCEPTED, 0),
    )


def unknown_variables(environ: Mapping[str, str] | None = None) -> list[str]:
    """Variables that are named as settings are and are none: misspelled perhaps, and without effect."""
    environ = os.environ if environ is None else environ
    known = read_settings({}).describe()
    return sorted(name for name in environ if re.match("(MCORE|SKYRL)_DSA_", name) and name not in known)


def default_bytes(device_bytes: int) -> int:
    """What a budget is by default where a device has so much memory of its own, 0 for none."""
    return max(DEFAULT_BYTES, 1 << (device_bytes // _PART_OF_MEMORY).bit_length() >> 1)


def _read[T](environ: Mapping[str, str], name: str, parse: Callable[[str], T], accepted: str, default: T) -> Setting[T]:
    """`parse` gets the trimmed value in lower case and raises `LookupError` for one it does not accept."""
    raw = environ.get(name)
    if raw is None or not raw.strip():
        reason = f"default, {name} is {'unset' if raw is None else 'empty'}"
        return Setting(name=name, value=default, raw=raw, reason=reason)
    try:
        value = parse(raw.strip().lower())
    except LookupError:
        fault = f"{raw!r}; accepted are {accepted}"
        return Setting(name=name, value=default, raw=raw, reason=f"default, {name} is refused", fault=fault)
    return Setting(name=name, value=value, raw=raw, reason=f"{name}={raw!r}")


def bytes_text(size: int) -> str:
    """A size as the settings accept it, in the greatest unit that divides it."""
    for unit in ("GiB", "MiB", "KiB"):
        count, rest = divmod(size, _BYTE_UNITS[unit.lower()])
        if count and not rest:
            return f"{count}{unit}"
    return f"{size}B"


def parse_bytes(text: str) -> int:
    """A size as the settings accept it, in lower case. Raises: LookupError for any other text."""
    # Nineteen digits hold 2**63 - 1.
    match = re.fullmatch(r"([0-9]{1,19}) *([a-z]*)", text)
    if match is None:
        raise LookupError(text)
    size = int(match[1]) * _BYTE_UNITS[match[2]]
    if not 0 < size < 2**63:
        raise LookupError(text)
    return size


def _parse_count(text: str) -> int:
    if re.fullmatch("[0-9]{1,10}", text) is None or int(text) >= 2**31:
        raise LookupError(text)
    return int(text)


def _parse_verify(text: str) -> int:
    return _VERIFY_WORDS[text] if text in _VERIFY_WORDS else _parse_count(text)
