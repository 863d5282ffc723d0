"""Which rows and columns of a DSA layer's 14 tensors a tensor-parallel rank holds, as data.

A wrong range of heads gives a model that runs and answers nonsense: every shape still fits. So the ranges are
integers that tests can tile, and loading, exporting and the memory report read them from here. Numbers below are
GLM-5.3-Flash's in BF16: H = 64 heads, a layer 249,828,864 bytes, G the number of ranks.

**Sharded by head.** `q_b_proj` (256 rows a head), `kv_b_proj` (512 rows a head: its 256 key rows, then its 256
value rows) and `o_proj` (256 columns a head) are 218,103,808 bytes, 87% of the layer; a rank holds heads `[r * H /
G, (r + 1) * H / G)` of all three. `o_proj` then sees some of its input channels only, so what it gives is a
partial sum, and one all-reduce of the layer's output (under sequence parallelism a reduce-scatter) follows. Wrong:

- another range for one of the three: queries of one head meet keys, values or output channels of another;
- `kv_b_proj` read as all keys, then all values: with G = 2 rank 0 gets the right number of rows, from the wrong
  heads;
- `o_proj` cut along its rows: a shape error here, where it is [4096, 16384], and silent in a model where it is
  square;
- no all-reduce: every rank goes on with its own heads' part of the answer.

**The indexer is replicated.** A score is a sum over the 32 index heads, `sum_h w_h * relu(q_h . key)`, and what
leaves the indexer is the selection made from it, not a sum that a later all-reduce could finish. A rank with some of
the heads would hold part of a score and select other tokens than its neighbour: no error, a wrong answer. To repair
that the scores have to be summed over ranks, `seq / 4` fp32 numbers for every query row, 256 KiB at 262,144 tokens,
where exchanging the finished selection costs 512 int32, 2 KiB; and the changed order of summation can flip a tie at
the cut. Sharding it would save at most 14,943,744 bytes, 6% of the layer. Its *query rows* are what can be divided
over ranks.

**The latent projections are replicated.** `kv_a_proj_with_mqa` gives one 512-channel latent a token that every head
reads whole: it has no head axis. A rank with 512 / G of the channels would normalise over these alone, a wrong root
mean square without any error, and multiply them with `kv_b_proj` columns that are short of the rest. Sound would be
to gather 512 channels a token before the norm, to save at most 4,194,304 bytes. `q_a_proj` (12,582,912 bytes) is
the same case with 1,536 channels, and the indexer reads its normalised output whole. Both norms' weights follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import shown
from mcore_dsa.rows import check_ranks

_BF16_BYTES = 2
_FP32_BYTES = 4
_APE = "indexer.index_kpool_compress_ape"


class DsaShard(Enum):
    """How a tensor is divided over tensor-parallel ranks: not at all, or by head along dimension 0 or 1."""

    Replicated = "replicated"
    HeadRows = "rows"
    HeadCols = "cols"


@dataclass(frozen=True, kw_only=True)
class DsaTensorPlan:
    """One tensor of a DSA layer on one rank. A vector has rows of one element.

    Attributes:
        name: the checkpoint's name under `self_attn.`.
        kind: how it is divided.
        elem_bytes: bytes of an element in the BF16 checkpoint.
        full_rows, full_row_elems: size of the whole tensor.
        local_rows, local_row_elems: size of this rank's part.
        src_row_offset, src_col_offset: where this rank's part begins in the whole tensor.
        ndim: 1 for a vector, 2 for a matrix.
    """

    name: str
    kind: DsaShard
    elem_bytes: int
    full_rows: int
    full_row_elems: int
    local_rows: int
    local_row_elems: int
    src_row_offset: int
    src_col_offset: int
    ndim: int

    @property
    def local_bytes(self) -> int:
        return self.local_rows * self.local_row_elems * self.elem_bytes

    @property
    def full_bytes(self) -> int:
        return self.full_rows * self.full_row_elems * self.elem_bytes

    @property
    def full_shape(self) -> tuple[int, ...]:
        return (self.full_rows, self.full_row_elems)[: self.ndim]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return (self.local_rows, self.local_row_elems)[: self.ndim]

    @property
    def src_slice(self) -> tuple[slice, ...]:
        """Indexes the whole tensor; what it gives is this rank's part."""
        rows = slice(self.src_row_offset, self.src_row_offset + self.local_rows)
        cols = slice(self.src_col_offset, self.src_col_offset + self.local_row_elems)
        return (rows, cols)[: self.ndim]


@dataclass(frozen=True)
class DsaTpPlan:
    """What rank `tp_rank` of `tp_size` holds of one DSA layer. At size 1 every part is the whole.

    Attributes:
        tensors: the 14 tensors in the checkpoint's order; copies need no transposition or permutation.

    Raises: TypeError where `tp_rank` or `tp_size` is not an integer, or `geometry` not a `DsaGeometry`; ValueError
        where the rank lies outside the group, or the attention heads do not divide by its size.
    """

    tp_rank: int
    tp_size: int
    geometry: DsaGeometry
    tensors: tuple[DsaTensorPlan, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in (("tp_rank", self.tp_rank), ("tp_size", self.tp_size)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} is {value!r}; accepted is an integer")
        if not isinstance(self.geometry, DsaGeometry):
            raise TypeError(f"geometry is {shown(self.geometry)}; accepted is a DsaGeometry")
        check_ranks("tp_size", self.tp_size)
        if not 0 <= self.tp_rank < self.tp_size:
            accepted = f"an integer >= 0, below tp_size={shown(self.tp_size)}"
            raise ValueError(f"tp_rank is {shown(self.tp_rank)}; accepted is {accepted}")
        heads = self.geometry.num_attention_heads
        if heads % self.tp_size:
            raise ValueError(f"tp_size is {shown(self.tp_size)}; accepted is a divisor of num_attention_heads={heads}")
        object.__setattr__(self, "tensors", tuple(self._plan(*row) for row in _tensor_table(self.geometry)))

    def _plan(self, name: str, kind: DsaShard, shape: tuple[int, ...]) -> DsaTensorPlan:
        full_rows, full_row_elems = shape[0], math.prod(shape[1:])
        row_parts = self.tp_size if kind is DsaShard.HeadRows else 1
        col_parts = self.tp_size if kind is DsaShard.HeadCols else 1
        local_rows, local_row_elems = full_rows // row_parts, full_row_elems // col_parts
        assert local_rows * row_parts == full_rows, name
        assert local_row_elems * col_parts == full_row_elems, name
        return DsaTensorPlan(
            name=name,
            kind=kind,
            elem_bytes=_BF16_BYTES,
            full_rows=full_rows,
            full_row_elems=full_row_elems,
            local_rows=local_rows,
            local_row_elems=local_row_elems,
            src_row_offset=self.tp_rank * local_rows if kind is DsaShard.HeadRows else 0,
            src_col_offset=self.tp_rank * local_row_elems if kind is DsaShard.HeadCols else 0,
            ndim=len(shape),
        )

    def get(self, name: str) -> DsaTensorPlan:
        """The plan of the tensor that the checkpoint calls `name` under `self_attn.`.

        Raises: ValueError where there is no such tensor; the message lists the known.
        """
        for tensor in self.tensors:
            if tensor.name == name:
                return tensor
        known = ", ".join(tensor.name for tensor in self.tensors)
        raise ValueError(f"name is {name!r}; accepted are {known}")

    def src_slice(self, name: str) -> tuple[slice, ...]:
        """Where this rank's part of a tensor lies in the checkpoint's: `full[plan.src_slice(name)]`."""
        return self.get(name).src_slice

    @property
    def local_bytes(self) -> int:
        """Bytes of this rank's part of a layer, as the BF16 checkpoint stores them."""
        return sum(tensor.local_bytes for tensor in self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of a whole layer, as the BF16 checkpoint stores them."""
        return sum(tensor.full_bytes for tensor in self.tensors)

    @property
    def replicated_bytes(self) -> int:
        """The bytes of `local_bytes` that every other rank holds as well."""
        return sum(tensor.local_bytes for tensor in self.tensors if tensor.kind is DsaShard.Replicated)

    @property
    def ape_widening_bytes(self) -> int:
        """What a layer takes in memory beyond `local_bytes`: `ape` is BF16 on disk and fp32 in the model."""
        ape = self.get(_APE)
        return ape.local_rows * ape.local_row_elems * (_FP32_BYTES - ape.elem_bytes)

    @property
    def needs_output_all_reduce(self) -> bool:
        """Whether the output projection gives a partial sum on every rank."""
        return self.tp_size > 1


def _tensor_table(g: DsaGeometry) -> list[tuple[str, DsaShard, tuple[int, ...]]]:
    heads = g.num_attention_heads
    replicated, rows, cols = DsaShard.Replicated, DsaShard.HeadRows, DsaShard.HeadCols
    return [
        ("q_a_proj.weight", replicated, (g.q_lora_rank, g.hidden_size)),
        ("q_a_layernorm.weight", replicated, (g.q_lora_rank,)),
        ("q_b_proj.weight", rows, (heads * g.qk_head_dim, g.q_lora_rank)),
        ("kv_a_proj_with_mqa.weight", replicated, (g.kv_cache_dim, g.hidden_size)),
        ("kv_a_layernorm.weight", replicated, (g.kv_lora_rank,)),
        ("kv_b_proj.weight", rows, (heads * (g.qk_nope_head_dim + g.v_head_dim), g.kv_lora_rank)),
        ("o_proj.weight", cols, (g.hidden_size, heads * g.v_head_dim)),
        ("indexer.wq_b.weight", replicated, (g.index_n_heads * g.index_head_dim, g.q_lora_rank)),
        ("indexer.wk.weight", replicated, (g.index_head_dim, g.hidden_size)),
        ("indexer.k_norm.weight", replicated, (g.index_head_dim,)),
        ("indexer.k_norm.bias", replicated, (g.index_head_dim,)),
        ("indexer.weights_proj.weight", replicated, (g.index_n_heads, g.hidden_size)),
        ("indexer.index_kpool_compress_gate", replicated, (g.index_head_dim, g.hidden_size)),
        (_APE, replicated, (g.index_kpool, g.index_head_dim)),
    ]
