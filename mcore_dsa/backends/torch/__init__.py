"""The backend in torch operations: the reference of the others, and the one for CPUs."""

from __future__ import annotations

import torch

from mcore_dsa.backends.torch.attend import attend, attend_backward, selection_faults, smallest_attend_bytes
from mcore_dsa.backends.torch.compress import compress_bytes, compress_keys, key_fingerprint
from mcore_dsa.backends.torch.scoring import numerics, tile_fingerprint, tile_for
from mcore_dsa.backends.torch.select import bytes_in_flight, select_pools, smallest_score_bytes


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
    def saved_row_bytes(*, heads: int, channels: int, elem_bytes: int) -> int:
        return 0

    @staticmethod
    def attend_traffic(elem_bytes: int) -> tuple[int, int]:
        """Latents are copied, and read by each product; what they contribute is summed in fp32, product by product.

        Narrow operands take two products where weights are one of them (`products.weigh`).
        """
        parts = 2 if elem_bytes < 4 else 1
        return (3 + parts) * elem_bytes, (4 + parts) * elem_bytes + 4 * parts * 4

    @staticmethod
    def fingerprint(device: torch.device, heads: int, dim: int) -> str:
        scores, keys = tile_fingerprint(device, heads, dim), key_fingerprint(compress_keys, device, dim)
        return f"{device.type}, {tile_for(device, heads)}, scores {scores:08x}, pool keys {keys:08x}"
