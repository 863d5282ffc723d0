"""The backend in Triton kernels. They, and with them Triton, are imported by what first runs one.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from mcore_dsa.backends.protocol import AttentionCall, SelectionCounters
from mcore_dsa.backends.triton.scratch import smallest_attend_bytes, smallest_score_bytes, strip_for
from mcore_dsa.kpool import PoolLayout, RowBounds


class TritonBackend:
    """`Backend` in Triton kernels, for bf16 queries and keys on CUDA; on the CPU under Triton's interpreter alone."""

    name = "triton"

    @staticmethod
    def compress(key_TBD: Tensor, gate_TBD: Tensor, ape_JD: Tensor, layout: PoolLayout) -> Tensor:
        from mcore_dsa.kernels.compress import compress_keys

        with _current(key_TBD.device):
            return compress_keys(key_TBD, gate_TBD, ape_JD, layout)

    @staticmethod
    def select(
        q_SBHD: Tensor,
        weights_SBH: Tensor,
        pool_key_PBD: Tensor,
        layout: PoolLayout,
        bounds: RowBounds,
        *,
        budget: int,
        score_bytes: int,
        use_relu: bool,
        counters: SelectionCounters,
    ) -> Tensor:
        from mcore_dsa.backends.triton.probe import probe
        from mcore_dsa.backends.triton.select import select_pools

        with _current(layout.device):
            if bounds.max_visible > budget:
                probe(layout.device, *q_SBHD.shape[2:], use_relu)
            return select_pools(
                q_SBHD,
                weights_SBH,
                pool_key_PBD,
                layout,
                bounds,
                budget=budget,
                score_bytes=score_bytes,
                use_relu=use_relu,
                counters=counters,
            )

    @staticmethod
    def selection_faults(selection_BSK: Tensor, call: AttentionCall) -> Tensor:
        from mcore_dsa.backends.triton.attend import selection_faults

        with _current(selection_BSK.device):
            return selection_faults(selection_BSK, call)

    @staticmethod
    def attend(
        q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, call: AttentionCall, out_SBHC: Tensor
    ) -> tuple[Tensor, ...]:
        from mcore_dsa.backends.triton.attend import attend

        with _current(q_SBHC.device):
            return attend(q_SBHC, kv_TBC, selection_BSK, call, out_SBHC)

    @staticmethod
    def attend_backward(
        q_SBHC: Tensor,
        kv_TBC: Tensor,
        selection_BSK: Tensor,
        call: AttentionCall,
        saved: tuple[Tensor, ...],
        out_grad_SBHC: Tensor,
        q_grad_SBHC: Tensor | None,
        sum_XC: Tensor | None,
    ) -> None:
        from mcore_dsa.backends.triton.attend import attend_backward

        with _current(q_SBHC.device):
            attend_backward(q_SBHC, kv_TBC, selection_BSK, call, saved, out_grad_SBHC, q_grad_SBHC, sum_XC)

    @staticmethod
    def fingerprint(device: torch.device, heads: int, dim: int) -> str:
        from mcore_dsa.backends.triton.probe import fingerprint

        with _current(device):
            return fingerprint(device, heads, dim)

    @staticmethod
    def numerics(device: torch.device) -> Hashable:
        """Nothing: a kernel's bits follow its binary, and that from what `fingerprint` names."""
        return None

    @staticmethod
    def compress_bytes(pools: int, dim: int, pool_size: int) -> int:
        return 0

    @staticmethod
    def select_bytes(device: torch.device, heads: int, dim: int, budget: int, pools: int, score_bytes: int) -> int:
        return strip_for(heads, budget, score_bytes, pools=pools).workspace.nbytes

    @staticmethod
    def smallest_score_bytes(device: torch.device, heads: int, dim: int, budget: int) -> int:
        return smallest_score_bytes(heads, budget)

    @staticmethod
    def smallest_attend_bytes(*, batch: int, heads: int, channels: int, dtype: torch.dtype, slots: int) -> int:
        return smallest_attend_bytes(batch=batch, channels=channels, slots=slots)

    @staticmethod
    def saved_row_bytes(*, heads: int, channels: int, elem_bytes: int) -> int:
        """The output, and the logarithm of each head's sum."""
        return heads * (channels * elem_bytes + 4)

    @staticmethod
    def attend_traffic(elem_bytes: int) -> tuple[int, int]:
        """Latents; those twice, and what each contributes to its gradient, written and read in fp32."""
        return elem_bytes, 2 * elem_bytes + 2 * 4


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the process's current device, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
