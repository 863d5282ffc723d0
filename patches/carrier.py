"""Functions that Megatron checkpoints carry what a selection found to their recomputation."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

from mcore_dsa.patches.registry import Patch

TENSOR_PARALLEL = "megatron.core.tensor_parallel"


def carrying(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    """`checkpoint`, the function it is given first wrapped into a `Carrier`."""
    from mcore_dsa.megatron.recompute import Carrier

    @functools.wraps(checkpoint)
    def carrying_checkpoint(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        return checkpoint(Carrier(function), *arguments, **keywords)

    return carrying_checkpoint


def _install() -> None:
    # Its callers look it up here at every call; Transformer Engine's is called under FP8 and FP4 alone.
    holder = importlib.import_module(TENSOR_PARALLEL)
    vars(holder).update(checkpoint=carrying(holder.checkpoint))


PATCHES = (
    Patch(
        "tensor_parallel.checkpoint",
        (f"{TENSOR_PARALLEL}:checkpoint",),
        "a recomputed forward takes the selection of its first pass in place of scoring again",
        _install,
    ),
)
