"""What a layer asks of the device: operators it launches and times the host waits, at 8,192 tokens, batch 1, one rank.

`python -m benchmarks.launches`. Counts of a forward and a backward, so the same on every run of a commit, whatever the
machine does beside. One layer is `KPoolDSAttention` as Megatron's `AbsorbedMLASelfAttention` calls it, its indexer and
its latents of GLM-5.3-Flash's size; four layers in a row are one micro-batch, where what they share shows. The parts
are calls of the public functions with the same arguments.

Columns:
    operators: what torch dispatched, views, allocations and work on host tensors included: what the host pays for.
    launches: those that compute on the device. An operator that launches several kernels is one.
    waits: times the host needs a result of the device: scalars read, data-dependent shapes, copies between both.
    collectives: calls into `torch.distributed`.

On a CPU every tensor lies in host memory. There a tensor counts as the host's if `cpu()` or `tolist()` brought it, if
a factory made it that was told no device, or if it was computed from such tensors alone. The tiles are the CPU's too:
`--device cuda` gives the launches of a GPU.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from benchmarks.cases import BUDGET, DIM, HEADS, POOL_SIZE
from mcore_dsa import PoolLayout, patches, select_pools, sparse_attention
from mcore_dsa.megatron import KPoolDSATransformerConfig, KPoolDSAttention

TOKENS = 8192
LAYERS = 4
ATTENTION_HEADS, LATENT, HIDDEN, QUERY_LATENT = 2, 512, 256, 128
SCALE = LATENT**-0.5

# The device is asked how many there are, or for a value.
_WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "repeat_interleave", "_unique", "_unique2"}
_WAITS |= {"unique_consecutive", "unique_dim", "is_nonzero"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "set_", "lift_fresh"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_FACTORIES = {torch.tensor, torch.as_tensor, torch.arange, torch.zeros, torch.ones, torch.full, torch.empty}


class Counts(TorchDispatchMode):
    """Operators dispatched while it is entered, and calls that copy to the host."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.launches, self.waits, self.collectives = (Counter[str]() for _ in range(4))
        self._on_host: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._calls = _Calls(self)

    def __enter__(self) -> Counts:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if func.namespace == "c10d":
            self.collectives[name] += 1
            return result
        self.operators[name] += 1
        host = [self.is_host(x) for x in given]
        if given and all(host):
            for x in made:
                self.to_host(x)
        elif not (func.is_view or name in _ALLOCATES):
            self.launches[name] += 1
        if _waits(func, name, args, host):
            self.waits[name] += 1
        return result

    def is_host(self, tensor: Tensor) -> bool:
        return tensor in self._on_host or (tensor.device.type == "cpu" and self.device == "cuda")

    def to_host(self, tensor: Tensor) -> Tensor:
        self._on_host[tensor] = None
        return tensor
