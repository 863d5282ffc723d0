"""A Megatron backend for MLA with DSA that needs no Transformer Engine: own norms and own replicated linear layer.

Megatron's LocalSpecProvider cannot serve here: it has no `linear()`, and its norm refuses sequence parallelism.

Shapes by suffix: S rows of this rank, B batch, F input and U output features, E hidden channels, x any dimensions.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider, get_backend
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_data_parallel_rng_tracker_name
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import get_tensor_model_parallel_group_if_none
from torch import nn
from torch.nn import functional as F


def parameter_device(config: TransformerConfig) -> torch.device:
    return torch.device("cpu" if config.use_cpu_initialization else torch.cuda.current_device())


def compute_device() -> torch.device:
    """Where a model runs: on the process's CUDA device where it has one, whatever its parameters are built on."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _mark_replicated(parameter: nn.Parameter, config: TransformerConfig) -> None:
    """Tell Megatron that every TP rank holds this parameter whole and, under sequence parallelism, a partial gradient.

    `finalize_model_grads` sums the gradients of parameters marked `sequence_parallel` over TP; gradient norms count
    a parameter that is not `tensor_model_parallel` once.
    """
    vars(parameter).update(sequence_parallel=config.sequence_parallel, tensor_model_parallel=False)


def _check_norm(config: TransformerConfig, normalization: str) -> None:
    if config.normalization != normalization:
        raise ValueError(f"config.normalization is {config.normalization!r}; accepted here is {normalization!r}")
    if config.layernorm_zero_centered_gamma:
        raise ValueError(
            "config.layernorm_zero_centered_gamma is True; accepted is False: weights multiply as they are"
        )


class RMSNorm(nn.Module):
    """`weight * round(x / sqrt(mean(x**2) + eps))`: normalised in fp32, rounded to x's dtype, then scaled.

    The order of rounding is that of `Glm5NextTextRMSNorm` in transformers 5.24, so that outputs can be compared to
    the last bit. Input and output are `x_xE` of any floating dtype; `eps` defaults to `config.layernorm_epsilon`.

    Raises: ValueError where `config` asks for another normalization, or for zero-centred weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None) -> None:
        super().__init__()
        _check_norm(config, "RMSNorm")
        self.eps = config.layernorm_epsilon if eps is None else eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=parameter_device(config)))
        _mark_replicated(self.weight, config)

    def forward(self, x_xE: torch.Tensor) -> torch.Tensor:
        wide_xE = x_xE.float()
        normal_xE = wide_xE * torch.rsqrt(wide_xE.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normal_xE.to(x_xE.dtype)


class LayerNorm(nn.LayerNorm):
    """PyTorch's LayerNorm with bias, marked and placed as Megatron needs it.

    Raises: ValueError where `config` asks for another normalization, or for zero-centred weights.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float | None = None) -> None:
        _check_norm(config, "LayerNorm")
        eps = config.layernorm_epsilon if eps is None else eps
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=parameter_device(config))
        for parameter in self.parameters():
            _mark_replicated(parameter, config)


class DuplicatedLinear(nn.Module):
    """A linear layer without bias whose whole weight every TP rank holds, applied to the rank's own rows.

    Takes the place of Transformer Engine's `TELinear(parallel_mode="duplicated")` and its arguments; `(x_SBF)` to
    `(out_SBU, None)`, the None standing for the bias. The weight `[U, F]` is built equal on all TP ranks.

    Raises: ValueError for a bias, an expert, `skip_weight_param_allocation` and another parallel mode.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        parallel_mode: str | None = "duplicated",
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: torch.distributed.ProcessGroup | None = None,
        pg_collection: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        refused = {
            "bias": (bias, False),
            "is_expert": (is_expert, False),
            "skip_weight_param_allocation": (skip_weight_param_allocation, False),
            "parallel_mode": (parallel_mode, "duplicated"),
        }
        for argument, (value, accepted) in refused.items():
            if value != accepted:
                raise ValueError(f"{argument} is {value!r}; accepted by DuplicatedLinear is {accepted!r}")
        self.tp_group = get_tensor_model_parallel_group_if_none(tp_group or getattr(pg_collection, "tp", None))
        weight_UF = torch.empty(output_size, input_size, dtype=torch.float32, device=parameter_device(config))
        if config.perform_initialization:
            with replicated_rng(config):
                init_method(weight_UF)
        self.weight = nn.Parameter(weight_UF.to(config.params_dtype))
        _mark_replicated(self.weight, config)

    def forward(self, x_SBF: torch.Tensor) -> tuple[torch.Tensor, None]:
        return F.linear(x_SBF, self.weight), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: Any = None
    ) -> Any:
        """The weight as one tensor that TP rank 0 of DP rank 0 writes, for `megatron.core.dist_checkpointing`."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )

    def backward_dw(self) -> None:
        """Nothing is delayed: Megatron calls this to finish weight gradients of layers that do."""

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, {self.weight.shape[0]}"


def replicated_rng(config: TransformerConfig) -> AbstractContextManager[None]:
    """Random numbers that are the same on all TP ranks, drawn from where Megatron draws those of replicated weights."""
    tracker = get_cuda_rng_tracker()
    if config.use_cpu_initialization or not tracker.is_initialized():
        return nullcontext()
    forked: AbstractContextManager[None] = tracker.fork(get_data_parallel_rng_tracker_name())
    return forked


class LocalBackend(LocalSpecProvider):
    """The modules of this file where Megatron has none that work, and Megatron's parallel layers, MLP and experts."""

    def linear(self) -> type[DuplicatedLinear]:
        return DuplicatedLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type[RMSNorm] | type[LayerNorm]:
        if has_residual:
            raise ValueError(
                "has_residual is True; accepted is False: no norm of this backend is fused with a residual"
            )
        return RMSNorm if rms_norm else LayerNorm

    def core_attention(self) -> NoReturn:
        raise NotImplementedError("this backend has no core attention: the layer's specification names its own")


def default_backend(config: TransformerConfig) -> BackendSpecProvider:
    """Transformer Engine's modules where it is installed, `LocalBackend` otherwise.

    Raises: ValueError where `config.transformer_impl` asks for what absorbed MLA cannot be built from here.
    """
    if config.transformer_impl not in ("transformer_engine", "local"):
        raise ValueError(
            f"config.transformer_impl is {config.transformer_impl!r}; accepted are 'transformer_engine' and 'local'"
        )
    if not HAVE_TE:
        return LocalBackend()
    if config.transformer_impl == "local":
        raise ValueError(
            "config.transformer_impl is 'local'; accepted with Transformer Engine installed is 'transformer_engine': "
            "absorbed MLA then takes TELinear only"
        )
    return get_backend("transformer_engine")
