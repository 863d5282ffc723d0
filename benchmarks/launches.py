"""What attention layers ask of a device: operators launched and host waits, at 8,192 tokens, batch 1, on one rank.

`python -m benchmarks.launches`. A layer is `KPoolDSAttention` as Megatron's `AbsorbedMLASelfAttention` calls it, with
indexer and latents of GLM-5.3-Flash's size; four of them one after the other are one micro-batch, where what they share
shows. The parts are the public functions with arguments of the same shapes. Counts, so every run gives the same.

Columns:
    operators: what torch dispatched on tensors of the device, views and allocations included: host time.
    launches: those of them that compute. One that launches several kernels counts once.
    waits: times the host needs a result of the device: a value read, a shape that depends on data, a copy between them.
    collectives: calls into `torch.distributed`.

This runs on a CPU and with its tiles (a GPU's are larger: fewer launches), where all tensors lie in one memory: as the
host's counts what `cpu()` brought, what a factory made that was told no device, and what comes of these alone.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
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

from benchmarks.cases import BUDGET, DIM, HEADS, POOL_SIZE
from mcore_dsa import PoolLayout, patches, select_pools, sparse_attention
from mcore_dsa.megatron import KPoolDSATransformerConfig, KPoolDSAttention
from mcore_dsa.megatron.batch import _dense_plan

TOKENS = 8192
LAYERS = 4
ATTENTION_HEADS, LATENT, HIDDEN, QUERY_LATENT = 2, 512, 256, 128
SCALE = LATENT**-0.5

_WAITS = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "repeat_interleave", "_unique", "_unique2"}
_WAITS |= {"unique_consecutive", "unique_dim"}
_ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "lift_fresh"}
_INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}
_FACTORIES = {torch.tensor, torch.as_tensor}
_TO_HOST = {Tensor.cpu, Tensor.tolist, Tensor.numpy}


class Counts(TorchDispatchMode):
    """Counts by operator's name what runs inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operators, self.launches, self.waits, self.collectives = (Counter[str]() for _ in range(4))
        self._host: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._calls = _Calls(self)

    def __enter__(self) -> Counts:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if func.namespace == "c10d":
            self.collectives[name] += 1
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        by_host = [self.is_host(x) for x in given]
        result = func(*args, **kwargs)
        if all(by_host) and (given or kwargs.get("device") is None):
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    self.make_host(x)
            return result
        self.operators[name] += 1
        if not (func.is_view or name in _ALLOCATES):
            self.launches[name] += 1
        # A single number of the host's travels with the launch; more of them are copied first.
        mixed = any(here and x.ndim for here, x in zip(by_host, given, strict=True))
        by_mask = name in _INDEXES and any(x.dtype == torch.bool for x in tree_leaves(args[1]) if isinstance(x, Tensor))
        if name in _WAITS or mixed or by_mask:
            self.waits[name] += 1
        return result

    def is_host(self, x: Tensor) -> bool:
        return x.untyped_storage() in self._host

    def make_host(self, x: Tensor) -> Tensor:
        self._host.add(x.untyped_storage())
        return x


class _Calls(TorchFunctionMode):
    """What does not reach the dispatcher where host and device are one."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, counts = kwargs or {}, self._counts
        to_device = func is Tensor.to and any(isinstance(x, torch.device) for x in (*args, *kwargs.values()))
        if func in _TO_HOST and not counts.is_host(args[0]):
            counts.waits[func.__name__] += 1
            counts.launches["copy"] += 1
            if func is Tensor.cpu:
                with torch._C._DisableTorchDispatch():
                    return counts.make_host(args[0].clone())
        if to_device and counts.is_host(args[0]):
            counts.waits["to"] += 1
            counts.launches["copy"] += 1
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs).clone()
        if func in _FACTORIES and kwargs.get("device") is not None:
            counts.waits[func.__name__] += 1
            counts.launches["copy"] += 1
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def counted(call: Callable[[], Any]) -> tuple[Counts, Any]:
    with Counts() as counts:
        result = call()
    return counts, result


def layer(number: int) -> KPoolDSAttention:
    config = KPoolDSATransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=ATTENTION_HEADS,
        q_lora_rank=QUERY_LATENT,
        kv_lora_rank=LATENT,
        qk_head_dim=64,
        v_head_dim=64,
        dsa_indexer_n_heads=HEADS,
        dsa_indexer_head_dim=DIM,
        dsa_indexer_topk=BUDGET * POOL_SIZE,
        dsa_indexer_kpool=POOL_SIZE,
        dsa_indexer_kpool_always_select_tail=True,
        use_cpu_initialization=True,
    )
    return KPoolDSAttention(config, number, AttnMaskType.causal, softmax_scale=SCALE)


def inputs(tokens: int, seed: int) -> tuple[dict[str, Tensor], Tensor]:
    """Arguments of a layer, and a gradient for its output."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, 1, *shape, generator=generator)

    query, key = draw(ATTENTION_HEADS, LATENT).requires_grad_(), draw(1, LATENT).requires_grad_()
    return {"query": query, "key": key, "x": draw(HIDDEN), "qr": draw(QUERY_LATENT)}, draw(ATTENTION_HEADS * LATENT)


def of_layers(layers: list[KPoolDSAttention], tokens: int) -> tuple[Counts, Counts]:
    """Forward and backward of one micro-batch through the layers, each with inputs of its own."""
    # Its plan is its own, with what was brought to the host while nobody counted.
    _dense_plan.cache_clear()
    given = [inputs(tokens, seed) for seed in range(len(layers))]
    forward, outputs = counted(lambda: [one(**named) for one, (named, _) in zip(layers, given, strict=True)])
    grads = [grad for _, grad in given]

    def backwards() -> None:
        for out, grad in zip(reversed(outputs), reversed(grads), strict=True):
            out.backward(grad)

    backward, _ = counted(backwards)
    return forward, backward


def of_parts(tokens: int) -> dict[str, Counts]:
    """The selection, and attention forward and backward, called by themselves."""
    named, grad = inputs(tokens, 0)
    layout, position = PoolLayout.dense(tokens, pool_size=POOL_SIZE), torch.arange(tokens)
    q, weights, pool_key = (
        torch.randn(shape) for shape in ((tokens, 1, HEADS, DIM), (tokens, 1, HEADS), (layout.num_pools, 1, DIM))
    )
    selecting, selection = counted(lambda: select_pools(q, weights, pool_key, layout, position, budget=BUDGET))
    query, kv = named["query"], named["key"].squeeze(2)
    attending, out = counted(
        lambda: sparse_attention(query, kv, selection, layout, position, softmax_scale=SCALE, always_select_tail=True)
    )
    backward, _ = counted(lambda: out.backward(grad.view_as(out)))
    return {"select_pools": selecting, "sparse_attention, forward": attending, "sparse_attention, backward": backward}


def measure(tokens: int) -> dict[str, Counts]:
    layers = [layer(number) for number in range(1, LAYERS + 1)]
    # What a process or a module does once, such as agreeing on its settings.
    of_layers(layers, 64)
    parts = of_parts(tokens)
    one, four = of_layers(layers[:1], tokens), of_layers(layers, tokens)
    directions = ("forward", "backward")
    parts |= {f"1 layer, {name}": counts for name, counts in zip(directions, one, strict=True)}
    parts |= {f"{LAYERS} layers, {name}": counts for name, counts in zip(directions, four, strict=True)}
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.launches", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--names", action="store_true", help="also the ten most frequent launches and all waits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    patches.apply()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        found = measure(arguments.tokens)
        dist.destroy_process_group()
    columns = ("operators", "launches", "waits", "collectives")
    print(f"{arguments.tokens} tokens" + " " * 15, *(f"{name:>11}" for name in columns))
    for name, counts in found.items():
        print(f"{name:<26}", *(f"{getattr(counts, column).total():>11}" for column in columns))
        if arguments.names:
            print("   ", dict(counts.launches.most_common(10)), "\n    waits", dict(counts.waits))


if __name__ == "__main__":
    main()
