"""GLM-5.3-Flash's DeepSeek Sparse Attention for Megatron-Core, its indexer sharded over tensor parallelism.

Importing this package needs torch alone; `mcore_dsa.megatron` needs megatron-core.
"""

from mcore_dsa.attend import sparse_attention
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.kpool import PoolLayout, compress_keys, expand_selection
from mcore_dsa.selection import select_pools
from mcore_dsa.sharded import fused_qk_topk_kpool, select_pools_sharded
from mcore_dsa.tp_plan import DsaShard, DsaTensorPlan, DsaTpPlan

__version__ = "0.1.0"

__all__ = [
    "DsaGeometry",
    "DsaShard",
    "DsaTensorPlan",
    "DsaTpPlan",
    "PoolLayout",
    "compress_keys",
    "expand_selection",
    "fused_qk_topk_kpool",
    "select_pools",
    "select_pools_sharded",
    "sparse_attention",
]
