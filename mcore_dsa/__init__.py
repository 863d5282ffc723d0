"""GLM-5.3-Flash's DeepSeek Sparse Attention for Megatron-Core, its indexer sharded over tensor parallelism.

Importing this package needs torch alone, and only once a name is asked for; `mcore_dsa.megatron` needs megatron-core.

Letters of shapes, one meaning each in the whole package; a suffix as in `q_SBHD` names a tensor's dimensions:

    S rows (queries) of a call          O own rows, of this rank's shard     L rows a rank holds (sequence-parallel)
    R rows of a tile, strip or chunk    I items of a chunk                   X everything flattened
    T tokens (keys)                     B batch (samples)                    N segments (documents)
    P pools                             M pools (columns) of a block         J tokens of one pool
    K selected pools a row (budget)     W token slots a row                  G ranks of a group
    H heads                             D index channels                     C latent channels
    E hidden channels                   Q query-latent channels              F, U input and output features
    x any leading dimensions            1 one
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcore_dsa.functions import compress_keys, select_pools, sparse_attention
    from mcore_dsa.fused import fused_qk_topk_kpool
    from mcore_dsa.geometry import DsaGeometry
    from mcore_dsa.kpool import PoolLayout, expand_selection
    from mcore_dsa.record import LayerAgreement, SelectionRecord
    from mcore_dsa.rollout import from_rollout
    from mcore_dsa.sharded import select_pools_sharded, sparse_attention_sharded
    from mcore_dsa.state import IndexerState
    from mcore_dsa.tp_plan import DsaShard, DsaTensorPlan, DsaTpPlan

__version__ = "0.1.0"

__all__ = [
    "DsaGeometry",
    "DsaShard",
    "DsaTensorPlan",
    "DsaTpPlan",
    "IndexerState",
    "LayerAgreement",
    "PoolLayout",
    "SelectionRecord",
    "compress_keys",
    "expand_selection",
    "from_rollout",
    "fused_qk_topk_kpool",
    "select_pools",
    "select_pools_sharded",
    "sparse_attention",
    "sparse_attention_sharded",
]

_HOMES = {
    "DsaGeometry": "geometry",
    "DsaShard": "tp_plan",
    "DsaTensorPlan": "tp_plan",
    "DsaTpPlan": "tp_plan",
    "IndexerState": "state",
    "LayerAgreement": "record",
    "PoolLayout": "kpool",
    "SelectionRecord": "record",
    "compress_keys": "functions",
    "expand_selection": "kpool",
    "from_rollout": "rollout",
    "fused_qk_topk_kpool": "fused",
    "select_pools": "functions",
    "select_pools_sharded": "sharded",
    "sparse_attention": "functions",
    "sparse_attention_sharded": "sharded",
}


def __getattr__(name: str) -> Any:
    # torch takes a second to import, which the command line's help and its verifier do without.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
