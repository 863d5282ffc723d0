"""The backend in torch operations: the reference of the others, and the one for CPUs."""

from __future__ import annotations

import zlib

import torch

from mcore_dsa.backends.torch.attend import attend, attend_backward, selection_faults, smallest_attend_bytes
from mcore_dsa.backends.torch.compress import compress_bytes, compress_keys
from mcore_dsa.backends.torch.scoring import numerics, tile_fingerprint, tile_for
from mcore_dsa.backends.torch.select import bytes_in_flight, select_pools, smallest_score_bytes
from mcore_dsa.kpool import PoolLayout


class TorchBackend:
    """`Backend` in torch operations, for any device and floating dtype."""

    name = "torch"
    compress = staticmethod(compress_keys)
    select = staticmethod(select_pools)
    selection_faults = staticmethod(selection_faults)
    attend = staticmethod(attend)
    attend_backward = staticmethod(attend_backward)
    numerics = staticmethod(numerics)
    compress_bytes = staticmethod(compress_bytes)
    select_bytes = staticmethod(bytes_in_flight)
    smallest_score_bytes = staticmethod(smallest_score_bytes)
    smallest_attend_bytes = staticmethod(smallest_attend_bytes)

    @staticmethod
    def fingerprint(device: torch.device, heads: int, dim: int) -> str:
        scores, keys = tile_fingerprint(device, heads, dim), _key_fingerprint(device, dim)
        return f"{device.type}, {tile_for(device, heads)}, scores {scores:08x}, pool keys {keys:08x}"


def _key_fingerprint(device: torch.device, dim: int) -> int:
    """Digest of the bits to which this device compresses fixed keys, of ordinary size and next to nothing."""
    generator = torch.Generator("cpu").manual_seed(21)
    layout = PoolLayout.dense(256, pool_size=4, device=device)
    key, gate = (torch.randn(256, 1, dim, generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
    key[128:] *= 1e-38
    ape = torch.zeros(4, dim, dtype=torch.float32, device=device)
    pool_key = compress_keys(key.to(device), (4 * gate).to(device), ape, layout)
    return zlib.crc32(pool_key.cpu().numpy().tobytes())
