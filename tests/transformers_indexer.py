"""The indexer of transformers, with random weights."""

import torch
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer


def random_indexer(
    hidden: int, q_lora: int, *, heads: int, dim: int, pool_size: int, index_topk: int, tail: bool
) -> Glm5NextTextIndexer:
    config = Glm5NextTextConfig(
        hidden_size=hidden,
        q_lora_rank=q_lora,
        num_attention_heads=4,
        num_key_value_heads=4,
        qk_rope_head_dim=0,
        index_n_heads=heads,
        index_head_dim=dim,
        index_topk=index_topk,
        index_kpool=pool_size,
        index_kpool_always_select_tail=tail,
    )
    indexer = Glm5NextTextIndexer(config, layer_idx=0)
    with torch.no_grad():
        for parameter in indexer.parameters():
            parameter.normal_()
    return indexer
