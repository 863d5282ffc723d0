"""What a selector keeps of every sequence to decode: compressed keys, and the last tokens' own keys and gates.

Letters of shapes: `mcore_dsa/__init__.py`; here a sample is one sequence, and S rows stand at its newest tokens.

Sequences are of any length and hold their valid tokens alone, so padding before, behind and between them is one thing:
it is left out. Pools are counted from a sequence's own first token. Lengths are known on the host: only a validity mask
that lies on a device is waited for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from mcore_dsa.backends import SelectionCounters, Target, resolve
from mcore_dsa.checks import (
    check_bool,
    check_device,
    check_floating,
    check_integer,
    check_kind,
    check_natural,
    check_positive,
    kind_of,
)
from mcore_dsa.eager import uncompiled
from mcore_dsa.kpool import PoolLayout, RowBounds
from mcore_dsa.workspace import bytes_allowed

# Token ids of all sequences together are int32.
_IDS = 2**31


class IndexerState:
    """The index cache of a batch of sequences, of one layer.

    Whatever the pieces in which it is appended, selections are bit for bit those of `compress_keys` and `select_pools`
    over the whole sequence, given the same queries, head weights, keys and gates.

    Args:
        ape_JD: floating `[pool_size, dim]`, learned offset of each place in a pool; kept by reference.
        batch: sequences, all empty at first.
        capacity: tokens that each sequence may hold.
        dtype: of the keys and gates that will come, and of the compressed keys.
        rewind_window: tokens by which any `rewind` is exact; it keeps that many keys and gates of every sequence.

    Raises: TypeError, ValueError for what does not fit.
    """

    def __init__(
        self, ape_JD: Tensor, *, batch: int, capacity: int, dtype: torch.dtype, rewind_window: int = 64
    ) -> None:
        check_floating("ape_JD", ape_JD, (None, None))
        if 0 in ape_JD.shape:
            raise ValueError(f"ape_JD has shape {tuple(ape_JD.shape)}; accepted are at least one place and one channel")
        check_positive("batch", batch)
        check_positive("capacity", capacity)
        check_natural("rewind_window", rewind_window)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or dtype.itemsize == 1:
            raise TypeError(f"dtype is {dtype!r}; accepted is a floating-point dtype of 16, 32 or 64 bits")
        self._ape_JD = ape_JD.detach()
        self._capacity, self._rewind_window = capacity, rewind_window
        (pool_size, dim), device = ape_JD.shape, ape_JD.device
        self._pool_size, self._pools = pool_size, -(-capacity // pool_size)
        tokens = batch * self._pools * pool_size
        if tokens > _IDS:
            raise ValueError(
                f"capacity is {capacity} for a batch of {batch}; accepted are at most {_IDS} tokens in all, whole pools"
            )
        recent = max(1, rewind_window + pool_size - 1)
        self._pool_key_BPD = torch.empty(batch, self._pools, dim, dtype=dtype, device=device)
        # Token t of a sequence in place t % R, keys then gates.
        self._recent_2BRD = torch.empty(2, batch, recent, dim, dtype=dtype, device=device)
        # Sequences as segments of one sample: their rows stand at tokens of their own, and go through one selection.
        begin = torch.arange(batch, device=device).unsqueeze(0) * (self._pools * pool_size)
        self._layout = PoolLayout.from_segments(
            begin, begin + self._pools * pool_size, num_tokens=tokens, pool_size=pool_size
        )
        self._length_B = torch.zeros(batch, dtype=torch.int64, device="cpu")
        self._kept_from_B = torch.zeros_like(self._length_B)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self._length_B.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that each sequence may hold."""
        return self._capacity

    @property
    def length_B(self) -> Tensor:
        """int64 on the CPU, tokens in each sequence; a copy."""
        return self._length_B.clone()

    @property
    def nbytes(self) -> int:
        """Bytes held, `ape` aside; all of them from the beginning on, whatever the lengths."""
        layout = self._layout
        held = (self._pool_key_BPD, self._recent_2BRD, self._length_B, self._kept_from_B, layout.pool_token_BP)
        segments = (layout.segment_start_BN, layout.segment_end_BN, layout.segment_first_pool_BN)
        return sum(x.nbytes for x in (*held, *segments))

    @uncompiled
    @torch.no_grad()
    def append(self, key_SBD: Tensor, gate_SBD: Tensor, valid_BS: Tensor | None = None) -> None:
        """Put tokens behind every sequence, one or many; all of them or, where they are refused, none.

        Args:
            key_SBD, gate_SBD: the normalised index keys and their compression gates, in the state's dtype.
            valid_BS: bool, the tokens that are there; None: all.

        Raises: TypeError, ValueError for what does not fit, and for more tokens than the capacity.
        """
        check_floating("key_SBD", key_SBD, (None, self.batch, self._ape_JD.shape[1]))
        check_floating("gate_SBD", gate_SBD, tuple(key_SBD.shape))
        for name, tensor in (("key_SBD", key_SBD), ("gate_SBD", gate_SBD)):
            if tensor.dtype != self._pool_key_BPD.dtype:
                raise TypeError(f"{name} is {tensor.dtype}; accepted is the state's dtype, {self._pool_key_BPD.dtype}")
        check_device(self._layout.device, key_SBD=key_SBD, gate_SBD=gate_SBD)
        valid_BS = self._valid_on_host(valid_BS, key_SBD.shape[0])
        count_B = valid_BS.sum(1)
        start_B, stop_B = self._length_B, self._length_B + count_B
        if bool((stop_B > self._capacity).any()):
            sample = int((stop_B > self._capacity).nonzero()[0])
            raise ValueError(
                f"key_SBD brings {int(count_B[sample])} tokens for sequence {sample}, which holds "
                f"{int(start_B[sample])}; accepted are at most {self._capacity} in all, the capacity"
            )
        row_X = valid_BS.nonzero()[:, 1]
        # Where token 0 of each sequence would stand in `row_X`.
        origin_B = count_B.cumsum(0) - count_B - start_B
        self._close_pools(key_SBD, gate_SBD, row_X, origin_B, stop_B)
        places = self._recent_2BRD.shape[2]
        sample_X, token_X = _ranges(torch.maximum(start_B, stop_B - places), stop_B)
        moved = torch.stack([sample_X, token_X % places, row_X[token_X + origin_B[sample_X]]])
        sample, place, row = moved.to(self._layout.device, non_blocking=True)
        for recent_BRD, new_SBD in zip(self._recent_2BRD, (key_SBD, gate_SBD), strict=True):
            recent_BRD[sample, place] = new_SBD[row, sample]
        self._length_B, self._kept_from_B = stop_B, torch.maximum(self._kept_from_B, stop_B - places)

    @uncompiled
    @torch.no_grad()
    def select(
        self,
        q_SBHD: Tensor,
        weights_SBH: Tensor,
        valid_BS: Tensor | None = None,
        *,
        budget: int,
        score_bytes: int | None = None,
        use_relu: bool = True,
        counters: SelectionCounters | None = None,
    ) -> Tensor:
        """`select_pools` for the newest rows of every sequence.

        Args:
            q_SBHD, weights_SBH: index queries and head weights of rows, the last of which stands at the last token.
            valid_BS: bool, the rows that are there, as for `append`; None: all. The others select nothing.
            budget, score_bytes, use_relu, counters: as for `select_pools`.

        Returns: int32 `[b, s, budget]`, ascending ids of pools counted from the sequence's first token, -1 behind them.

        Raises: as `select_pools`, and ValueError for more rows than a sequence has tokens.
        """
        check_floating("q_SBHD", q_SBHD, (None, self.batch, None, self._ape_JD.shape[1]))
        rows, batch, heads = q_SBHD.shape[:3]
        check_positive("heads of q_SBHD", heads)
        check_floating("weights_SBH", weights_SBH, (rows, batch, heads))
        check_device(self._layout.device, q_SBHD=q_SBHD, weights_SBH=weights_SBH)
        check_positive("budget", budget)
        score_bytes = bytes_allowed("score_bytes", score_bytes, self._layout.device)
        check_bool(use_relu=use_relu)
        check_kind(SelectionCounters, counters=counters)
        bounds = self._bounds(self._valid_on_host(valid_BS, rows))
        backend = resolve("auto", Target.of_scores(q_SBHD, self._pool_key_BPD))
        selection_1XK = backend.select(
            q_SBHD.transpose(0, 1).flatten(0, 1).unsqueeze(1),
            weights_SBH.transpose(0, 1).flatten(0, 1).unsqueeze(1),
            self._pool_key_BPD.flatten(0, 1).unsqueeze(1),
            self._layout,
            bounds,
            budget=budget,
            score_bytes=score_bytes,
            use_relu=use_relu,
            counters=SelectionCounters() if counters is None else counters,
        )
        # Of one sequence after the other; -1 stays below every first pool.
        return selection_1XK.sub_(bounds.first_BS.unsqueeze(-1)).clamp_(min=-1).view(batch, rows, budget)

    def rewind(self, length_B: Tensor) -> None:
        """Shorten every sequence to `length_B`, integer `[b]`; none where one is refused.

        To the end of any pool however far back, as the compressed keys stay. Within a pool its tokens are needed: any
        rewind by up to `rewind_window` tokens, counted from the greatest length it has had, and what more is there.

        Raises: TypeError, ValueError for lengths that do not fit, that grow, or that cut a pool whose tokens are gone.
        """
        check_integer("length_B", length_B, ndim=1)
        if length_B.shape[0] != self.batch:
            raise ValueError(f"length_B has {length_B.shape[0]} values; accepted is one a sequence, {self.batch}")
        length_B = length_B.to("cpu", torch.int64, copy=True)
        if bool(((length_B < 0) | (length_B > self._length_B)).any()):
            raise ValueError(
                f"length_B is {length_B.tolist()}; accepted are lengths from 0 to those at present, "
                f"{self._length_B.tolist()}"
            )
        open_B = length_B % self._pool_size
        gone_B = (open_B > 0) & (length_B - open_B < self._kept_from_B)
        if bool(gone_B.any()):
            sample = int(gone_B.nonzero()[0])
            length = int(length_B[sample])
            raise ValueError(
                f"length_B is {length} for sequence {sample}, within a pool whose tokens are no longer kept; accepted "
                f"are multiples of {self._pool_size} and a rewind by up to rewind_window, {self._rewind_window} tokens"
            )
        self._length_B, self._kept_from_B = length_B, torch.minimum(self._kept_from_B, length_B)

    def reset(self) -> None:
        """Empty every sequence; `rewind` to 0 empties some."""
        self.rewind(torch.zeros_like(self._length_B))

    @torch.no_grad()
    def take(self, sample_B: Tensor) -> IndexerState:
        """A state of its own of the sequences `sample_B`, integer, in that order; one named twice comes twice.

        Raises: TypeError, ValueError for what are no numbers of sequences, and for none.
        """
        check_integer("sample_B", sample_B, ndim=1)
        sample_B = sample_B.cpu()
        if not len(sample_B) or bool(((sample_B < 0) | (sample_B >= self.batch)).any()):
            raise ValueError(f"sample_B is {sample_B.tolist()}; accepted are one or more of 0 ... {self.batch - 1}")
        taken = IndexerState(
            self._ape_JD,
            batch=len(sample_B),
            capacity=self._capacity,
            dtype=self._pool_key_BPD.dtype,
            rewind_window=self._rewind_window,
        )
        taken._length_B, taken._kept_from_B = self._length_B[sample_B], self._kept_from_B[sample_B]
        pools_B = taken._length_B // self._pool_size
        for new, (old, pools) in enumerate(zip(sample_B.tolist(), pools_B.tolist(), strict=True)):
            taken._pool_key_BPD[new, :pools] = self._pool_key_BPD[old, :pools]
            taken._recent_2BRD[:, new] = self._recent_2BRD[:, old]
        return taken

    def _valid_on_host(self, valid_BS: Tensor | None, rows: int) -> Tensor:
        if valid_BS is None:
            return torch.ones(self.batch, rows, dtype=torch.bool, device="cpu")
        if not isinstance(valid_BS, Tensor) or valid_BS.dtype != torch.bool:
            raise TypeError(f"valid_BS is {kind_of(valid_BS)}; accepted are a torch.bool tensor and None")
        if valid_BS.shape != (self.batch, rows):
            raise ValueError(f"valid_BS has shape {tuple(valid_BS.shape)}; accepted is [{self.batch}, {rows}]")
        return valid_BS.cpu()

    def _close_pools(self, key_SBD: Tensor, gate_SBD: Tensor, row_X: Tensor, origin_B: Tensor, stop_B: Tensor) -> None:
        """Compress the pools that end before `stop_B`, of tokens kept and of new ones."""
        pool_size, places = self._pool_size, self._recent_2BRD.shape[2]
        sample_X, pool_X = _ranges(self._length_B // pool_size, stop_B // pool_size)
        if not len(pool_X):
            return
        device = self._layout.device
        sample_I = sample_X.repeat_interleave(pool_size)
        token_I = (pool_X.unsqueeze(1) * pool_size + torch.arange(pool_size, device="cpu")).flatten()
        is_kept_I = token_I < self._length_B[sample_I]
        row_I = row_X[(token_I + origin_B[sample_I]).masked_fill_(is_kept_I, 0)]
        kept_X = is_kept_I.nonzero().flatten()
        kept = torch.stack([kept_X, sample_I[kept_X], token_I[kept_X] % places]).to(device, non_blocking=True)
        sample, row = torch.stack([sample_I, row_I]).to(device, non_blocking=True)
        key_I1D, gate_I1D = (new_SBD[row, sample].unsqueeze(1) for new_SBD in (key_SBD, gate_SBD))
        for token_I1D, recent_BRD in zip((key_I1D, gate_I1D), self._recent_2BRD, strict=True):
            token_I1D[kept[0], 0] = recent_BRD[kept[1], kept[2]]
        layout = _pools_in_a_row(len(pool_X), pool_size, device)
        sample, pool = torch.stack([sample_X, pool_X]).to(device, non_blocking=True)
        backend = resolve("auto", Target.of(device, key_I1D.dtype, pool_size=pool_size))
        self._pool_key_BPD[sample, pool] = backend.compress(key_I1D, gate_I1D, self._ape_JD, layout)[:, 0]

    def _bounds(self, valid_BS: Tensor) -> RowBounds:
        """What valid rows see that stand at the newest tokens, sequence after sequence."""
        count_B = valid_BS.sum(1)
        if bool((count_B > self._length_B).any()):
            sample = int((count_B > self._length_B).nonzero()[0])
            raise ValueError(
                f"q_SBHD has {int(count_B[sample])} rows for sequence {sample}; accepted are at most as many as the "
                f"tokens it holds, {int(self._length_B[sample])}"
            )
        seen_BS = ((self._length_B - count_B).unsqueeze(1) + valid_BS.cumsum(1)) * valid_BS
        first_BS = (torch.arange(self.batch, device="cpu") * self._pools).unsqueeze(1).expand_as(seen_BS)
        position_BS = (first_BS * self._pool_size + seen_BS - 1).masked_fill(~valid_BS, -1)
        bounds_XBS = torch.stack([first_BS, seen_BS // self._pool_size, seen_BS % self._pool_size])
        return RowBounds.from_host(position_BS.flatten(), bounds_XBS.view(3, 1, -1), self._layout.device)


def _ranges(start_B: Tensor, stop_B: Tensor) -> tuple[Tensor, Tensor]:
    """int64, sample and value of each integer in each sample's half-open range, sample after sample."""
    count_B = stop_B - start_B
    sample_X = torch.arange(len(count_B), device="cpu").repeat_interleave(count_B)
    origin_B = start_B - (count_B.cumsum(0) - count_B)
    return sample_X, torch.arange(len(sample_X), device="cpu") + origin_B[sample_X]


@functools.lru_cache(maxsize=16)
def _pools_in_a_row(pools: int, pool_size: int, device: torch.device) -> PoolLayout:
    """Kept, since making one waits for the device; decoding asks for the same few."""
    return PoolLayout.dense(pools * pool_size, pool_size=pool_size, device=device)
