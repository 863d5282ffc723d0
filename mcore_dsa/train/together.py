"""What one rank finds, told to every rank, so that all of them go on or all of them raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


def of_every_rank[T](value: T) -> list[T]:
    """The value of each rank, in their order; every rank of the default process group has to call this."""
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def refuse_together(fault: str | None) -> None:
    """End a step that any rank found a fault in; every rank has to call this.

    Raises: ValueError on every rank with the fault of the first that has one, and its number where it is not rank 0.
    """
    for rank, found in enumerate(of_every_rank(fault)):
        if found:
            raise ValueError(f"{found} (rank {rank})" if rank else found)


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
        fault = str(error)
    refuse_together(fault)
