"""Stand-ins for CUDA, installed only where there is none.

A function of torch is replaced for the whole process only if without CUDA it can do nothing but raise. What means
something on a CPU too (`torch.zeros`, `Tensor.type`, `torch.cuda.manual_seed`) is changed only as the Megatron
functions listed here see it: everybody else keeps theirs, no mode watches every call, and threads make no difference.
"""

import importlib
import inspect
import logging
import pkgutil
import queue
from types import CodeType, FunctionType
from typing import Any

import torch
from mcore_dsa.patches.registry import Patch

CPU_LITERAL = {
    "cuda": "cpu",
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}
RANDOM = "megatron.core.tensor_parallel.random"
WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


def torch_cuda(name: str, reason: str) -> Patch:
    """`torch.cuda.<name>` becomes `torch.cpu.<name>`, PyTorch's own counterpart."""

    def install() -> None:
        setattr(torch.cuda, name, getattr(torch.cpu, name))

    return Patch(f"torch.cuda.{name}", (f"torch.cpu:{name}",), reason, install, only_without_cuda=True)


def _tensor_cuda(tensor: torch.Tensor, *_args: object, **_kwargs: object) -> torch.Tensor:
    return tensor


def _install_tensor_cuda() -> None:
    torch.Tensor.cuda = _tensor_cuda  # type: ignore[method-assign, assignment]


def function_at(symbol: str) -> FunctionType:
    """The plain function behind a symbol, whatever static, class or wrapping decorators stand before it."""
    found = pkgutil.resolve_name(symbol)
    function = inspect.unwrap(getattr(found, "__func__", found))
    assert isinstance(function, FunctionType), symbol
    return function


def cpu_literals(constant: Any) -> Any:
    """A code object or constant with every literal that names CUDA naming the CPU instead."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=cpu_literals(constant.co_consts))
    if isinstance(constant, tuple | frozenset):
        return type(constant)(map(cpu_literals, constant))
    return CPU_LITERAL.get(constant, constant) if isinstance(constant, str) else constant


def literals(symbol: str, reason: str) -> Patch:
    """The literals `"cuda"` and `"torch.cuda.*Tensor"` inside one function name the CPU.

    The function object stays the same, so whoever imported it earlier runs the changed code too.
    """

    def skip() -> str | None:
        code = function_at(symbol).__code__
        return "mended upstream: no literal names CUDA any more" if cpu_literals(code) == code else None

    def install() -> None:
        function = function_at(symbol)
        function.__code__ = cpu_literals(function.__code__)

    return Patch(symbol.partition(":")[2], (symbol,), reason, install, skip, only_without_cuda=True)


class _CpuGenerator:
    """`torch.cuda` as Megatron's random-state tracker uses it, over the CPU's default generator."""

    get_rng_state = staticmethod(lambda device="cpu": torch.get_rng_state())
    manual_seed = staticmethod(torch.manual_seed)
    current_device = staticmethod(torch.cpu.current_device)

    @property
    def random(self) -> "_CpuGenerator":
        return self


class _TorchOfTracker:
    """`torch` as `megatron.core.tensor_parallel.random` sees it."""

    cuda = _CpuGenerator()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _set_rng_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
    if graph_safe:
        raise ValueError("graph_safe is True; accepted is False: a CUDA graph needs CUDA")
    torch.set_rng_state(new_state)


def _install_rng() -> None:
    random = importlib.import_module(RANDOM)
    vars(random).update(torch=_TorchOfTracker(), _set_cuda_rng_state=_set_rng_state)
    # The tracker's generator is the CPU's own here, so this warning would come with every parameter and every dropout.
    logging.getLogger(RANDOM).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _skip_results_queue() -> str | None:
    writer = importlib.import_module(WRITER)
    return None if writer._results_queue is None else "the queue exists already"


def _install_results_queue() -> None:
    vars(importlib.import_module(WRITER)).update(_results_queue=queue.Queue())


OPTIMIZER = "megatron.core.optimizer.optimizer"
CLIP = "megatron.core.optimizer.clip_grads"
DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"

LITERALS = (
    literals(f"{OPTIMIZER}:MegatronOptimizer.has_grad_norm_group", "a flag reduced over ranks is made on CUDA"),
    literals(f"{OPTIMIZER}:MixedPrecisionOptimizer.__init__", "overflow buffer and unit scale are made on CUDA"),
    literals(f"{OPTIMIZER}:Float16OptimizerWithFloat16Params.__init__", "parameters are sorted by CUDA type names"),
    literals(f"{OPTIMIZER}:FP32Optimizer.__init__", "the unit scale is made on CUDA"),
    literals(f"{CLIP}:get_grad_norm_fp32", "the norm is made on CUDA"),
    literals(f"{CLIP}:clip_grad_by_total_norm_fp32", "gradients are required to have a CUDA type name"),
    literals(f"{CLIP}:count_zeros_fp32", "the count is made on CUDA"),
    literals(f"{DISTRIBUTED}._build_model_and_main_param_groups", "parameters are sorted by CUDA type names"),
    literals("megatron.core.utils:local_multi_tensor_l2_norm", "the norm without Apex is made on CUDA"),
    literals("megatron.core.transformer.utils:get_default_causal_mask", "the mask of plain attention is made on CUDA"),
    literals(f"{SCHEDULES}:forward_backward_no_pipelining", "the token count is made on CUDA"),
    literals(f"{SCHEDULES}:forward_backward_pipelining_with_interleaving", "the token count is made on CUDA"),
    literals(f"{SCHEDULES}:forward_backward_pipelining_without_interleaving", "the token count is made on CUDA"),
)

PATCHES = (
    torch_cuda("current_device", "device= of the parallel layers, mappings, rotary tables and gradient buffers"),
    torch_cuda("current_stream", "read by every gradient synchronisation of DistributedDataParallel"),
    torch_cuda("synchronize", "called by pipeline exchanges and before a checkpoint is written"),
    Patch(
        "torch.Tensor.cuda",
        (),
        "the distributed optimizer's gather for a checkpoint; tied embeddings over pipeline stages",
        _install_tensor_cuda,
        only_without_cuda=True,
    ),
    Patch(
        "tensor_parallel.random",
        (f"{RANDOM}:torch", f"{RANDOM}:_get_cuda_rng_state", f"{RANDOM}:_set_cuda_rng_state"),
        "the random-state tracker behind initialisation, dropout and recomputation keeps CUDA generator states",
        _install_rng,
        only_without_cuda=True,
    ),
    *LITERALS,
    Patch(
        "filesystem_async._results_queue",
        (f"{WRITER}:_results_queue", f"{WRITER}:get_write_results_queue"),
        "a save starts a spawned manager process: 3 s each, and a hang in a script without a __main__ guard",
        _install_results_queue,
        _skip_results_queue,
        only_without_cuda=True,
    ),
)
