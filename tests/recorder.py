"""What a block calls in `torch.distributed`, on this rank."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

# Everything there that communicates, in the torch that is installed.
PREFIXES = ("all_", "barrier", "batch_", "broadcast", "gather", "irecv", "isend", "monitored_", "recv", "reduce")
PREFIXES += ("scatter", "send")
NAMES = [name for name in dir(dist) if name.startswith(PREFIXES) and name != "reduce_op"]
# Of one collective the name since torch 2.13 stands for both.
SAME = {"all_gather_into_tensor": "all_gather_single"}

type Form = tuple[torch.dtype, tuple[int, ...]] | None


@dataclass(frozen=True)
class Recorded:
    """One call; of its first two arguments the dtype and shape, None where they are no tensors.

    `received` counts the bytes that other ranks sent, of the collectives that move tensors of this package.
    """

    name: str
    group: Any
    output: Form
    input: Form
    received: int | None


class Recorder:
    """Records the calls of a `with` block, in order."""

    def __enter__(self) -> "Recorder":
        self.calls: list[Recorded] = []
        self._patch = pytest.MonkeyPatch()
        for name in NAMES:
            self._patch.setattr(dist, name, self._recording(name, getattr(dist, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    def received(self) -> int:
        """Bytes from other ranks so far; TypeError where a call is of a kind whose bytes nobody counts."""
        return sum(call.received for call in self.calls)  # type: ignore[misc]

    def _recording(self, name: str, original: Any) -> Any:
        same = SAME.get(name, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            output, given = (_form(x) for x in (*args, None, None)[:2])
            received = _received(same, args, kwargs)
            self.calls.append(Recorded(same, kwargs.get("group"), output, given, received))
            return original(*args, **kwargs)

        return call


def _form(x: Any) -> Form:
    return (x.dtype, tuple(x.shape)) if isinstance(x, Tensor) else None


def _received(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
    if name == "all_gather_single":
        return int(args[0].nbytes - args[1].nbytes)
    if name == "all_to_all_single":
        own = kwargs["output_split_sizes"][dist.get_rank(kwargs["group"])]
        return int(args[0].nbytes - own * args[0][:1].nbytes)
    return None
