"""Megatron's transformer configuration for k-pool DSA, with other defaults where Megatron's are wrong for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.transformer_config import MLATransformerConfig

from mcore_dsa.geometry import DsaGeometry

_UNQUANTISED = "its projections, and what selects, keep the dtype of the parameters"
_NO_GRAPH = "a selection synchronises with the host"

# Fields of which this attention supports one value only, with the reason that an error gives.
_FIXED: dict[str, tuple[Any, str]] = {
    "experimental_attention_variant": ("dsa", "the layer is DeepSeek Sparse Attention"),
    "multi_latent_attention": (True, "queries and keys are absorbed latents"),
    "normalization": ("RMSNorm", "every norm but the indexer's key norm is one"),
    "qk_layernorm": (True, "the indexer reads the normalised query residual"),
    "qk_pos_emb_head_dim": (0, "these layers are NoPE"),
    "rope_type": ("rope", "these layers are NoPE"),
    "rotary_scaling_factor": (1.0, "absorbed MLA scales its softmax by it, whatever the rope_type"),
    "softmax_scale": (None, "absorbed MLA has its own, qk_head_dim ** -0.5"),
    "use_mup": (False, "it sets softmax_scale, which absorbed MLA does not read"),
    "softmax_type": ("vanilla", "the sparse attention has no sink"),
    "window_size": (None, "the indexer alone says which tokens a row sees"),
    "qk_l2_norm": (False, "absorbed MLA has its norms on the latents"),
    "qk_clip": (False, "no largest logit is recorded"),
    "log_max_attention_logit": (False, "no largest logit is recorded"),
    "attention_output_gate": (False, "absorbed MLA has no output gate"),
    "layernorm_zero_centered_gamma": (False, "a norm's weights multiply as they are, and so a checkpoint holds them"),
    "fp8": (None, _UNQUANTISED),
    "fp4": (None, _UNQUANTISED),
    "quant_recipe": (None, _UNQUANTISED),
    "use_kitchen": (False, _UNQUANTISED),
    "gtp_weight_remat_size": (1, "this attention's weights are cut over tensor-parallel ranks alone"),
    "enable_cuda_graph": (False, _NO_GRAPH),
    "external_cuda_graph": (False, _NO_GRAPH),
    "cuda_graph_impl": ("none", _NO_GRAPH),
    "mtp_num_layers": (None, "multi-token prediction blocks are not supported"),
    "add_bias_linear": (False, "absorbed MLA has no biases"),
    "attention_dropout": (0.0, "the sparse attention has no dropout"),
    "dsa_indexer_topk_freq": (1, "index sharing between layers is not supported"),
    "dsa_indexer_skip_topk_offset": (0, "index sharing between layers is not supported"),
    "dsa_indexer_use_sparse_loss": (False, "the indexer is frozen"),
    "dsa_indexer_rotate_activation": (False, "this indexer has no Hadamard rotation"),
    "dsa_indexer_scoring_relu": (True, "scores are sums of rectified products"),
    "dsa_indexer_k_norm_fp32": (False, "the key norm accumulates in fp32 already"),
    "dsa_kernel_backend": ("none", "Megatron's kernels select tokens, not pools"),
}
_REQUIRED_SIZES = (
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_kpool",
    "q_lora_rank",
)


class _OneForEveryLayer(int):
    """1, of which nobody may ask whether it is set.

    Megatron's own `DSAttention` alone does (`dsa_indexer_topk_freq or 1`, while it is built), and would train on its
    own selection of tokens, without an error, wherever a specification was not given to `use_kpool_dsa`.
    """

    def __bool__(self) -> bool:
        raise TypeError(
            "config is a KPoolDSATransformerConfig; accepted by Megatron's DSAttention, which selects tokens and not "
            "pools, is another one: give the specification to use_kpool_dsa"
        )


@dataclass
class KPoolDSATransformerConfig(MLATransformerConfig):
    """`MLATransformerConfig` of a model whose attention is k-pool DSA.

    Sizes of the indexer have no default: `dsa_indexer_n_heads`, `dsa_indexer_head_dim`, `dsa_indexer_topk` (tokens a
    row selects), `dsa_indexer_kpool` (tokens compressed into one pool) and `dsa_indexer_kpool_always_select_tail`.

    Raises: ValueError listing every field that is missing, does not fit, or asks for what is not supported.
    """

    dsa_indexer_kpool: int | None = None
    """Tokens compressed into one key, Hugging Face's `index_kpool`."""

    dsa_indexer_kpool_always_select_tail: bool | None = None
    """Whether a row also attends its own incomplete pool, `index_kpool_always_select_tail`."""

    experimental_attention_variant: Any = "dsa"
    qk_layernorm: bool = True
    qk_pos_emb_head_dim: int = 0
    rope_type: str = "rope"
    rotary_scaling_factor: float = 1.0
    add_bias_linear: bool = False
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    dsa_indexer_loss_coeff: float | None = 0.0
    dsa_indexer_rotate_activation: bool = False
    dsa_indexer_k_norm_epsilon: float | None = 1e-6

    def __post_init__(self) -> None:
        # Before Megatron's own checks, whose errors would hide the reason, and after them: some fields set others.
        self._raise_faults()
        super().__post_init__()
        self._raise_faults()
        self.dsa_indexer_topk_freq = _OneForEveryLayer(1)

    def _raise_faults(self) -> None:
        faults = [*self._fixed_faults(), *self._size_faults(), *self._parallel_faults()]
        if faults:
            raise ValueError("k-pool DSA configuration: " + "; ".join(faults))

    def _fixed_faults(self) -> list[str]:
        return [
            f"{name} is {getattr(self, name)!r}; accepted is {accepted!r}: {reason}"
            for name, (accepted, reason) in _FIXED.items()
            # Some fields are of one of the accepted Megatron versions only.
            if getattr(self, name, accepted) != accepted
        ]

    def _size_faults(self) -> list[str]:
        faults = []
        for name in _REQUIRED_SIZES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                faults.append(f"{name} is {value!r}; accepted is an integer >= 1, which has no default")
        if not isinstance(self.dsa_indexer_kpool_always_select_tail, bool):
            value = self.dsa_indexer_kpool_always_select_tail
            faults.append(f"dsa_indexer_kpool_always_select_tail is {value!r}; accepted are True and False")
        if self.dsa_indexer_loss_coeff:
            faults.append(f"dsa_indexer_loss_coeff is {self.dsa_indexer_loss_coeff!r}; accepted is 0: it is frozen")
        if self.dsa_indexer_k_norm_epsilon is None or not self.dsa_indexer_k_norm_epsilon > 0:
            faults.append(
                f"dsa_indexer_k_norm_epsilon is {self.dsa_indexer_k_norm_epsilon!r}; accepted is a number > 0"
            )
        if not faults and self.dsa_indexer_topk % self.dsa_indexer_kpool:
            faults.append(
                f"dsa_indexer_topk is {self.dsa_indexer_topk}; accepted is a multiple of dsa_indexer_kpool, "
                f"{self.dsa_indexer_kpool}"
            )
        return faults

    def _parallel_faults(self) -> list[str]:
        faults = []
        if self.tensor_model_parallel_size > 1 and not self.sequence_parallel:
            faults.append(
                f"sequence_parallel is {self.sequence_parallel!r}; accepted with tensor_model_parallel_size "
                f"{self.tensor_model_parallel_size} is True: absorbed MLA projects a rank's own rows"
            )
        virtual = self.virtual_pipeline_model_parallel_size
        if self.pipeline_model_parallel_size == 2 and virtual is not None and self.batch_p2p_comm:
            faults.append(
                f"batch_p2p_comm is {self.batch_p2p_comm!r}; accepted with 2 pipeline stages of {virtual} chunks is "
                "False, with overlap_p2p_comm True: the stages before and after are one peer, and a batch pairs its "
                "messages wrong, without an error"
            )
        return faults

    @property
    def dsa_indexer_pool_budget(self) -> int:
        """Pools a row may select."""
        topk, pool_size = self.dsa_indexer_topk, self.dsa_indexer_kpool
        assert isinstance(topk, int)
        assert isinstance(pool_size, int)
        return topk // pool_size

    @classmethod
    def from_geometry(cls, geometry: DsaGeometry, **fields: Any) -> KPoolDSATransformerConfig:
        """The configuration of a checkpoint's geometry; `fields` are all others, and win where both give one.

        `num_layers` is Megatron's to be given: a DSA layer's own shape does not depend on it.
        """
        sizes: dict[str, Any] = {
            "hidden_size": geometry.hidden_size,
            "num_attention_heads": geometry.num_attention_heads,
            "q_lora_rank": geometry.q_lora_rank,
            "kv_lora_rank": geometry.kv_lora_rank,
            "qk_head_dim": geometry.qk_nope_head_dim,
            "qk_pos_emb_head_dim": geometry.qk_rope_head_dim,
            "v_head_dim": geometry.v_head_dim,
            "layernorm_epsilon": geometry.rms_norm_eps,
            "dsa_indexer_n_heads": geometry.index_n_heads,
            "dsa_indexer_head_dim": geometry.index_head_dim,
            "dsa_indexer_topk": geometry.index_topk,
            "dsa_indexer_kpool": geometry.index_kpool,
            "dsa_indexer_kpool_always_select_tail": geometry.index_kpool_always_select_tail,
        }
        return cls(**{**sizes, **fields})
