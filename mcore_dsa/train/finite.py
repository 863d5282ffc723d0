"""Whether a run's weights and optimizer are finite, the frozen ones with them, which no gradient would tell of."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from mcore_dsa.train.loop import Trainer
from mcore_dsa.train.together import of_every_rank


def refuse_not_finite(trainer: Trainer, what: str) -> None:
    """Make sure that all weights and the optimizer's state are finite; every rank has to call this.

    Raises: RuntimeError on every rank, with the first tensor that is not and the ranks that hold it.
    """
    of_ranks = of_every_rank(_first_not_finite(trainer))
    names = [name for name in of_ranks if name is not None]
    if names:
        ranks = [rank for rank, name in enumerate(of_ranks) if name == names[0]]
        raise RuntimeError(f"{what}: {names[0]} is not finite on ranks {ranks}; accepted are finite numbers alone")


def _first_not_finite(trainer: Trainer) -> str | None:
    names, greatest = [], []
    for name, tensor in _tensors(trainer):
        if tensor.is_floating_point() and tensor.numel():
            names.append(name)
            # NaN carries through, and no copy is made, as `isfinite` of the whole would.
            greatest.append(torch.linalg.vector_norm(tensor.detach(), ord=math.inf).float().to(_device_of(trainer)))
    if not greatest:
        return None
    finite = torch.stack(greatest).isfinite().tolist()
    return next((name for name, is_finite in zip(names, finite, strict=True) if not is_finite), None)


def _device_of(trainer: Trainer) -> torch.device:
    parameter: Tensor = next(trainer.chunks[0].parameters())
    return parameter.device


def _tensors(trainer: Trainer) -> Iterator[tuple[str, Tensor]]:
    for chunk, module in trainer.named_chunks():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            yield f"{chunk}.{name}", tensor
    for each in getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer]):
        # A rank without a trainable parameter has an optimizer of none.
        for parameter, state in getattr(each.optimizer, "state", {}).items():
            yield "a main weight of the optimizer", parameter
            for name, value in state.items():
                if isinstance(value, Tensor):
                    yield f"{name} of the optimizer", value
