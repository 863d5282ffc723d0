"""A stand-in for the C++ that Megatron compiles in the first backward through an output it had discarded."""

import importlib
from collections.abc import Callable

import torch
from mcore_dsa.patches.registry import Patch

RANDOM = "megatron.core.tensor_parallel.random"


def share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give `output`, whose storage was emptied, the bytes of `recomputed`; every view of it sees them.

    On storages, below autograd: no tensor's version moves.
    """
    storage = output.untyped_storage()
    storage.resize_(recomputed.untyped_storage().nbytes())
    storage.copy_(recomputed.untyped_storage())


def _get_share_storage() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return share_storage


def _skip() -> str | None:
    if hasattr(importlib.import_module(RANDOM), "_get_share_storage"):
        return None
    return "this version compiles nothing for it"


def _install() -> None:
    vars(importlib.import_module(RANDOM)).update(_get_share_storage=_get_share_storage)


PATCHES = (
    Patch(
        "random._get_share_storage",
        (),
        "mla_up_proj recomputation compiles C++ for minutes, and waits forever on a killed process's lock",
        _install,
        _skip,
        only_without_cuda=True,
    ),
)
