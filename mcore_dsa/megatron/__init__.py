"""k-pool DSA as Megatron-Core modules: the only part of this package that imports Megatron besides the training job."""

from mcore_dsa.megatron.attention import KPoolDSAttention
from mcore_dsa.megatron.config import KPoolDSATransformerConfig
from mcore_dsa.megatron.indexer import KPoolDSAIndexer
from mcore_dsa.megatron.replay import ModelSelections
from mcore_dsa.megatron.replicas import check_replicas
from mcore_dsa.megatron.spec import (
    check_wiring,
    kpool_dsa_attention_spec,
    kpool_dsa_block_spec,
    kpool_dsa_gpt_model,
    kpool_dsa_hybrid_model,
    kpool_dsa_layer_spec,
    use_kpool_dsa,
)

__all__ = [
    "KPoolDSAIndexer",
    "KPoolDSATransformerConfig",
    "KPoolDSAttention",
    "ModelSelections",
    "check_replicas",
    "check_wiring",
    "kpool_dsa_attention_spec",
    "kpool_dsa_block_spec",
    "kpool_dsa_gpt_model",
    "kpool_dsa_hybrid_model",
    "kpool_dsa_layer_spec",
    "use_kpool_dsa",
]
