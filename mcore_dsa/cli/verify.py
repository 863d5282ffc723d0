"""`mcore-dsa verify`: a checkpoint's headers against its configuration, and its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill

from mcore_dsa.binding import CheckpointBinding
from mcore_dsa.binding import verify as verify_checkpoint
from mcore_dsa.cli.outcome import WIDTH, Outcome
from mcore_dsa.safetensors_files import Fault

# As wide as the longest kind of fault, and two.
_INDENT = 18 * " "


def verify(path: str, config: str | None, read_values: bool) -> Outcome:
    """All faults of a checkpoint; see the command's help for the arguments."""
    binding = verify_checkpoint(path, config)
    if read_values:
        # It brings torch, which headers do without.
        from mcore_dsa.values import value_faults

        binding = replace(binding, faults=(*binding.faults, *value_faults(binding)))
    return outcome_of(binding)


def outcome_of(binding: CheckpointBinding) -> Outcome:
    """A verified checkpoint as an answer."""
    return Outcome(binding.to_dict(), lambda: _text(binding), ok=not binding.faults)


def fault_lines(faults: Sequence[Fault]) -> list[str]:
    """A table for people; names stay whole, so that they can be searched for."""
    lines = []
    for fault in faults:
        where = f", in {fault.file}" if fault.file else ""
        detail = f"expected {fault.expected}, found {fault.found}{where}"
        lines += [
            f"{fault.kind:{len(_INDENT)}}{fault.tensor}".rstrip(),
            fill(detail, WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT, break_on_hyphens=False),
        ]
    return lines


def _text(binding: CheckpointBinding) -> str:
    title = fill(str(binding).splitlines()[0], WIDTH, break_long_words=False, break_on_hyphens=False)
    return "\n".join([title, *fault_lines(binding.faults)])
