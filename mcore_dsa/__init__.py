"""GLM-5.3-Flash's DeepSeek Sparse Attention for Megatron-Core, its indexer sharded over tensor parallelism.

Importing this package needs torch alone, and only once a name is asked for; `mcore_dsa.megatron` needs megatron-core.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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

_HOMES = {
    "DsaGeometry": "geometry",
    "DsaShard": "tp_plan",
    "DsaTensorPlan": "tp_plan",
    "DsaTpPlan": "tp_plan",
    "PoolLayout": "kpool",
    "compress_keys": "kpool",
    "expand_selection": "kpool",
    "fused_qk_topk_kpool": "sharded",
    "select_pools": "selection",
    "select_pools_sharded": "sharded",
    "sparse_attention": "attend",
}


def __getattr__(name: str) -> Any:
    # torch takes a second to import, which the command line's help and its verifier do without.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
