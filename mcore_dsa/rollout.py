"""Selections as rollout engines hand them over, made a record of.

Letters of shapes: `mcore_dsa/__init__.py`; `x` are the DSA layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_dsa.checks import check_bool, check_natural, check_positive, check_sequence, kind_of
from mcore_dsa.record import CHUNK_BYTES, SelectionRecord

_UNUSED = torch.iinfo(torch.int32).max


def from_rollout(
    requests: Sequence[Tensor],
    *,
    pool_size: int,
    budget: int,
    always_select_tail: bool,
    padded_lengths: Sequence[int] | None = None,
) -> SelectionRecord:
    """The record of a micro-batch whose documents are the requests of a rollout, in this order.

    Args:
        requests: of each int32 `[tokens - 1, layers, width]`: token ids local to the request in any order within a row,
            -1 unused. A row all of -1 has no record (a prompt's prefix that came from a cache), and neither has the
            last token, which was never fed.
        pool_size, budget, always_select_tail: of the model. With the tail each row holds all of it, without none of it.
        padded_lengths: tokens of each request's place in the micro-batch; by default its own. Of a dense batch all are
            the batch's sequence length.

    Raises: TypeError, ValueError for other dtypes and shapes; ValueError naming request, layer, row and id of a token
    that is out of range, in the future or twice, of a pool or a tail that is given in part, of more pools than the
    budget, and of a row that some layers have and others have not.
    """
    check_positive("pool_size", pool_size)
    check_positive("budget", budget)
    check_bool(always_select_tail=always_select_tail)
    _check_requests(requests)
    lengths = [len(request) + 1 for request in requests]
    places = lengths if padded_lengths is None else list(check_sequence("padded_lengths", padded_lengths))
    for number, place in enumerate(places):
        check_natural(f"padded_lengths[{number}]", place)
    check_natural("the sum of padded_lengths", sum(places))
    if len(places) != len(lengths) or any(own > place for own, place in zip(lengths, places, strict=True)):
        raise ValueError(
            f"padded_lengths is {places[:8]} for requests of {lengths[:8]}; accepted are as many, none shorter"
        )
    selection_xTK = torch.full((requests[0].shape[1], sum(places), budget), -1, dtype=torch.int32, device="cpu")
    recorded_T = torch.ones(sum(places), dtype=torch.bool, device="cpu")
    start = 0
    for number, (request, place) in enumerate(zip(requests, places, strict=True)):
        step = max(1, CHUNK_BYTES // (48 * max(1, request[0].numel() if len(request) else 1)))
        for first in range(0, len(request), step):
            rows = _Rows(request[first : first + step].cpu(), number, first, pool_size, budget, always_select_tail)
            stop = start + first + len(rows.given_R)
            selection_xTK[:, start + first : stop], recorded_T[start + first : stop] = rows.pools_xRK(), rows.given_R
        recorded_T[start + len(request)] = False
        start += place
    return SelectionRecord(
        selection_xTK=selection_xTK,
        recorded_T=recorded_T,
        lengths=tuple(lengths),
        padded_lengths=tuple(places),
        pool_size=pool_size,
    )


def _check_requests(requests: Sequence[Tensor]) -> None:
    check_sequence("requests", requests)
    for number, request in enumerate(requests):
        if not isinstance(request, Tensor) or request.dtype != torch.int32:
            raise TypeError(f"request {number} is {kind_of(request)}; accepted is torch.int32")
        if request.ndim != 3 or request.shape[1] != requests[0].shape[1]:
            raise ValueError(
                f"request {number} has shape {tuple(request.shape)}; accepted is [tokens - 1, layers, width], with the "
                "layers of the first request"
            )
    if not requests or requests[0].shape[1] == 0:
        raise ValueError("requests holds no layer; accepted are one request or more of one layer or more")


class _Rows:
    """Some rows of a request.

    Sorted, the tokens of a row are those of its pools, then its tail, then what is unused.
    """

    def __init__(
        self, token_RxW: Tensor, request: int, first: int, pool_size: int, budget: int, always_select_tail: bool
    ) -> None:
        self._token_RxW, self._request, self._first = token_RxW, request, first
        self._pool_size, self._budget = pool_size, budget
        self._row_R = torch.arange(first, first + len(token_RxW), dtype=torch.int32, device="cpu")
        self._seen_R = (self._row_R + 1) // pool_size * pool_size
        self._tail_R = (self._row_R + 1 - self._seen_R) * always_select_tail
        given_Rx = (token_RxW != -1).any(-1)
        self.given_R = given_Rx.any(-1)
        self._refuse((given_Rx != self.given_R[:, None]).unsqueeze(-1), "a row that all layers have, or none")

    def pools_xRK(self) -> Tensor:
        """int32, the pools of every row, ascending."""
        token_RxW, row_R11, seen_R11 = self._token_RxW, self._row_R[:, None, None], self._seen_R[:, None, None]
        self._refuse((token_RxW < -1) | (token_RxW > row_R11), "-1 and tokens up to the row's own")
        sorted_RxW = token_RxW.masked_fill(token_RxW < 0, _UNUSED).sort(-1).values
        twice_RxW = (sorted_RxW[..., 1:] == sorted_RxW[..., :-1]) & (sorted_RxW[..., 1:] != _UNUSED)
        self._refuse(twice_RxW, "a token once", sorted_RxW[..., 1:])
        pooled_RxW = sorted_RxW < seen_R11
        in_tail_Rx = (~pooled_RxW & (sorted_RxW != _UNUSED)).sum(-1)
        wanted_Rx = self._tail_R[:, None] * self.given_R[:, None]
        tail_RxW = (in_tail_Rx != wanted_Rx).unsqueeze(-1)
        self._refuse(tail_RxW, "the whole tail with always_select_tail, and none of it without")
        width = self._budget * self._pool_size
        self._refuse(pooled_RxW[..., width:], f"at most {self._budget} pools", sorted_RxW[..., width:])
        room = max(0, width - sorted_RxW.shape[-1])
        kept_RxW = torch.nn.functional.pad(sorted_RxW.masked_fill(~pooled_RxW, _UNUSED), (0, room), value=_UNUSED)
        pool_RxKJ = kept_RxW[..., :width].unflatten(-1, (self._budget, self._pool_size))
        first_RxK1 = pool_RxKJ[..., :1]
        as_whole_RxKJ = first_RxK1 + torch.arange(self._pool_size, dtype=torch.int32, device="cpu")
        whole_RxK1 = (first_RxK1 % self._pool_size == 0) & (pool_RxKJ == as_whole_RxKJ).all(-1, keepdim=True)
        in_part_RxKJ = ~whole_RxK1 & (pool_RxKJ != _UNUSED)
        self._refuse(in_part_RxKJ.flatten(-2), f"all {self._pool_size} tokens of a pool", pool_RxKJ.flatten(-2))
        first_RxK = first_RxK1.squeeze(-1)
        return torch.where(first_RxK == _UNUSED, -1, first_RxK // self._pool_size).transpose(0, 1)

    def _refuse(self, bad_RxW: Tensor, accepted: str, token_RxW: Tensor | None = None) -> None:
        """Raise for the first of these that is bad; `bad` with one column is of a row as a whole."""
        if not bool(bad_RxW.any()):
            return
        row, layer, column = (int(index) for index in bad_RxW.nonzero()[0])
        tokens = (self._token_RxW if token_RxW is None else token_RxW)[row, layer]
        named = f"token {int(tokens[column])}" if bad_RxW.shape[-1] == len(tokens) else f"tokens {tokens[:8].tolist()}"
        raise ValueError(
            f"layer {layer}, row {self._first + row} of request {self._request} selects {named}; accepted is {accepted}"
        )
