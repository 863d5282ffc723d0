"""What one rank finds, told to every rank, so that all of them go on or all of them raise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist


def of_every_rank[T](value: T) -> list[T]:
    """The value of each rank, in their order; every rank of the default process group has to call this."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_together(fault: str | None) -> None:
    """End a step that any rank found a fault in; every rank has to call this.

    Raises: ValueError on every rank with the fault of the first that has one, and who has it where that is neither all
        ranks nor rank 0 alone.
    """
    of_ranks = of_every_rank(fault)
    first = next((found for found in of_ranks if found is not None), None)
    if first is not None:
        whose = [rank for rank, found in enumerate(of_ranks) if found == first]
        raise ValueError(first if len(whose) == len(of_ranks) or whose == [0] else f"{first} ({_ranks_text(whose)})")


def refuse_differences(values: Mapping[str, Any]) -> None:
    """Make sure that all ranks have the same values by name; every rank has to call this.

    Raises: ValueError on every rank, a line for each value that is not rank 0's, fields of fields by their names.
    """
    of_ranks = of_every_rank(dict(_fields(values)))
    faults = []
    for name, accepted in of_ranks[0].items():
        ranks_of: dict[str, list[int]] = {}
        for rank, own in enumerate(of_ranks):
            if own[name] != accepted:
                ranks_of.setdefault(repr(own[name]), []).append(rank)
        faults += [
            f"{name} is {value} on {_ranks_text(ranks)}; accepted is rank 0's, {accepted!r}"
            for value, ranks in ranks_of.items()
        ]
    if faults:
        raise ValueError("\n".join(faults))


@contextmanager
def told_to_every_rank(what: str) -> Iterator[None]:
    """A step that touches files, of one rank or of all; every rank has to enter it.

    Raises: ValueError on every rank for an OSError or a ValueError of any, in a line that begins with `what`.
    """
    fault = None
    try:
        yield
    except OSError as error:
        where = f": {error.filename}" if error.filename is not None else ""
        fault = f"{what}: {error.strerror or error}{where}"
    except ValueError as error:
        fault = str(error) or f"{what}: {type(error).__name__}"
    refuse_together(fault)


def _fields(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
