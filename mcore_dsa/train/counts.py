"""What each rank did in a step, counted where it is done, and what that comes to in model FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Self

import torch
import torch.distributed as dist

from mcore_dsa.collectives import traffic
from mcore_dsa.megatron import KPoolDSAttention
from mcore_dsa.rows import PackWork
from mcore_dsa.train.config import JobConfig, ModelConfig

# Dense BF16 operations a second, from NVIDIA's data sheets; the first name that a device's name holds counts.
_PEAKS = {"GB200": 2.5e15, "B200": 2.25e15, "H200": 989e12, "H100": 989e12, "H800": 989e12, "A100": 312e12}


@dataclass(frozen=True, kw_only=True)
class RankCounts:
    """Counted on one rank; integers, so that they travel exactly.

    Attributes:
        indexer_us: microseconds of the host in projections, exchange and selection of the indexers.
        exchange_us: in the collectives of selection and attention, backward and waiting for slower ranks included.
        exchange_bytes: received in them.
        scored_pairs: (row, pool) pairs scored.
        verified_rows: rows of other ranks whose selection was made again here and compared.
    """

    indexer_us: int
    exchange_us: int
    exchange_bytes: int
    scored_pairs: int
    verified_rows: int

    @classmethod
    def so_far(cls, attentions: Sequence[KPoolDSAttention]) -> Self:
        """Since the process began."""
        return cls(
            indexer_us=round(1e6 * sum(attention.indexer_seconds for attention in attentions)),
            exchange_us=round(1e6 * traffic.seconds),
            exchange_bytes=traffic.received_bytes,
            scored_pairs=sum(attention.counters.scored_pairs for attention in attentions),
            verified_rows=sum(attention.counters.verified_rows for attention in attentions),
        )

    def since(self, before: Self) -> Self:
        """What came between."""
        differences = (now - then for now, then in zip(astuple(self), astuple(before), strict=True))
        return type(self)(**dict(zip([field.name for field in fields(self)], differences, strict=True)))

    def of_all_ranks(self, device: torch.device) -> tuple[Self, ...]:
        """Those of every rank, on every rank; all have to ask."""
        own = torch.tensor(astuple(self), dtype=torch.int64, device=device)
        all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(all_ranks, own)
        names = [field.name for field in fields(self)]
        return tuple(type(self)(**dict(zip(names, counts.tolist(), strict=True))) for counts in all_ranks)


def busiest_over_mean(counts: Sequence[RankCounts]) -> float:
    """Scored pairs of the busiest rank over the mean of all, 1.0 where nothing is scored."""
    pairs = [rank.scored_pairs for rank in counts]
    return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0


def model_flops(config: JobConfig, lengths: Sequence[int]) -> int:
    """FLOPs of a training step over documents of `lengths` tokens, all ranks together.

    Of attention the selected tokens, of the indexer the scored pairs: neither is what dense attention of these lengths
    would take. Two FLOPs a product; backward is twice the forward, but for the frozen indexer, which has none. What is
    padded, computed twice for a recompute, or by every rank because the flag is off, counts once or not at all.
    """
    model = config.model
    work = PackWork(tuple(lengths), model.dsa_indexer_kpool, model.dsa_indexer_topk // model.dsa_indexer_kpool)
    attended = work.pool_size * work.selected_pairs_before(work.rows)
    if model.dsa_indexer_kpool_always_select_tail:
        attended += work.tail_tokens_before(work.rows)
    letters = model.hybrid_layer_pattern or ("DE" if model.num_moe_experts else "D-") * model.num_layers
    layers = letters.count("D")
    weights, frozen = _weights_of_a_token(model, letters, config.padded_vocab_size)
    trained = work.rows * weights + layers * attended * model.num_attention_heads * 2 * model.kv_lora_rank
    scored = work.scored_pairs * model.dsa_indexer_n_heads * model.dsa_indexer_head_dim
    return int(2 * (3 * trained + work.rows * frozen + layers * scored))


def _weights_of_a_token(model: ModelConfig, letters: str, vocabulary: int) -> tuple[int, int]:
    """Weights that a token meets in products, trained and, of the indexers, frozen; `letters` as HybridModel's."""
    hidden, latent, query = model.hidden_size, model.kv_lora_rank, model.q_lora_rank
    heads, index = model.num_attention_heads, model.dsa_indexer_n_heads * model.dsa_indexer_head_dim
    attention = hidden * (query + latent + heads * model.v_head_dim)
    attention += heads * (query * model.qk_head_dim + latent * (model.qk_head_dim + model.v_head_dim))
    experts = hidden * (model.num_moe_experts or 0)
    experts += 3 * hidden * (model.moe_ffn_hidden_size or 0) * (model.moe_router_topk or 0)
    of_letter = {"D": attention, "-": 3 * hidden * model.ffn_hidden_size, "E": experts}
    indexer = query * index + hidden * (2 * model.dsa_indexer_head_dim + model.dsa_indexer_n_heads)
    trained = sum(letters.count(letter) * size for letter, size in of_letter.items())
    return trained + hidden * vocabulary, letters.count("D") * indexer


def peak_flops(config: JobConfig) -> float | None:
    """Of one device in a second, where that is known: BF16 on the accelerators of `_PEAKS`."""
    if config.training.dtype != "bf16" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((peak for known, peak in _PEAKS.items() if known in name), None)
