"""One call of sparse attention, with a gradient for its output, as tests vary and compare it."""

from dataclasses import dataclass, replace

import pytest
import torch
from draw import layout_of
from layouts import random_selection
from torch import Tensor

from mcore_dsa.attend import attend
from mcore_dsa.backends import AttentionCall, resolve
from mcore_dsa.backends.torch.slots import Slots
from mcore_dsa.functions import masked_attention, sparse_attention
from mcore_dsa.kpool import PoolLayout, RowBounds, expand_selection
from mcore_dsa.settings import DEFAULT_BYTES


@dataclass
class Case:
    """One call and a gradient for its output."""

    q: Tensor
    kv: Tensor
    selection: Tensor
    layout: PoolLayout
    position: Tensor
    out_grad: Tensor
    tail: bool = True
    scale: float = 0.3

    @classmethod
    def random(cls, segments, num_tokens, *, pool_size=4, budget=3, heads=4, channels=16, tail=True, rows=None, seed=0):
        torch.manual_seed(seed)
        layout = layout_of(segments, num_tokens=num_tokens, pool_size=pool_size)
        position = torch.arange(num_tokens) if rows is None else torch.randint(-1, max(1, num_tokens), (rows,))
        selection = random_selection(layout, position, budget)
        shape = (len(position), layout.batch, heads, channels)
        kv = torch.randn(num_tokens, layout.batch, channels)
        return cls(torch.randn(shape), kv, selection, layout, position, torch.randn(shape), tail)

    def tokens(self) -> Tensor:
        return expand_selection(self.selection, self.layout, self.position, always_select_tail=self.tail)

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(self, q=self.q.to(dtype), kv=self.kv.to(dtype), out_grad=self.out_grad.to(dtype))

    def rows(self, rows) -> "Case":
        return replace(
            self,
            q=self.q[rows],
            selection=self.selection[:, rows],
            position=self.position[rows],
            out_grad=self.out_grad[rows],
        )

    def out(self, **kwargs) -> Tensor:
        return sparse_attention(
            self.q,
            self.kv,
            self.selection,
            self.layout,
            self.position,
            softmax_scale=self.scale,
            always_select_tail=self.tail,
            **kwargs,
        )

    def attend(self, bounds: RowBounds, *, attend_bytes: int = DEFAULT_BYTES, **kwargs) -> Tensor:
        """The same of the backend, for rows that are located already."""
        call = AttentionCall(self.layout, bounds, self.scale, self.tail, attend_bytes)
        return attend(self.q, self.kv, self.selection, call, backend=resolve(), **kwargs)

    def run(self, **kwargs) -> tuple[Tensor, Tensor, Tensor]:
        """Output and the gradients of q and kv."""
        leaves = replace(self, q=self.q.detach().requires_grad_(), kv=self.kv.detach().requires_grad_())
        out = leaves.out(**kwargs)
        return out.detach(), *torch.autograd.grad(out, (leaves.q, leaves.kv), self.out_grad)

    def run_oracle(self) -> tuple[Tensor, Tensor, Tensor]:
        q, kv = self.q.detach().requires_grad_(), self.kv.detach().requires_grad_()
        out = masked_attention(q, kv, self.tokens(), softmax_scale=self.scale)
        return out.detach(), *torch.autograd.grad(out, (q, kv), self.out_grad)


def assert_equal(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def assert_sums_rows_in_order(case: Case, got: tuple[Tensor, Tensor, Tensor]) -> None:
    """The rows' own outputs and gradients, bit for bit; that of kv adds theirs, first row first."""
    out, q_grad, kv_grad = got
    total = torch.zeros_like(kv_grad)
    for row in range(len(case.position)):
        out_row, q_grad_row, kv_grad_row = case.rows(slice(row, row + 1)).run()
        assert_equal((out_row, q_grad_row), (out[row : row + 1], q_grad[row : row + 1]))
        total += kv_grad_row
    assert torch.equal(total, kv_grad)


def assert_as_exact_as_the_oracle(
    got: tuple[Tensor, ...], dense: tuple[Tensor, ...], exact: tuple[Tensor, ...]
) -> None:
    """fp32 results against float64 ones, within what fp32 costs at this shape.

    That is shown by the oracle's own fp32 error; another order of the sums may cost some more of it.
    """
    for ours, theirs, want in zip(got, dense, exact, strict=True):
        error, size = (float(x.abs().max()) if x.numel() else 0.0 for x in (theirs - want, want))
        assert ours.dtype == torch.float32
        assert ours.shape == want.shape
        assert bool(((ours - want).abs() <= 4 * error + 8 * torch.finfo(torch.float32).eps * size).all())


def smallest_budget(case: Case) -> int:
    with pytest.raises(ValueError, match="accepted are at least") as refusal:
        case.out(attend_bytes=1)
    return int(str(refusal.value).split("accepted are at least ")[1].split(",")[0])


def random_slots(items: int, width: int, channels: int, *, tokens: int, batch: int) -> tuple[Slots, Tensor]:
    """Slots of items, some of which hold no token, and gradients: zeros where unused, NaN in an empty item.

    An item's unused slots repeat its last token.
    """
    token = torch.stack([torch.randperm(tokens)[:width].sort().values * batch + i % batch for i in range(items)])
    unused, empty = torch.rand(items, width) < 0.2, torch.rand(items, 1) < 0.1
    unused[:, -1] = False
    grad = torch.randn(items, width, channels).masked_fill(unused.unsqueeze(2), 0.0)
    grad = grad.masked_fill(empty.unsqueeze(2), float("nan"))
    return Slots(torch.where(unused, token[:, -1:], token), unused | empty, empty), grad


def add_row_by_row(sum_XC: Tensor, target_IW: Tensor, grad_IWC: Tensor, batch: int) -> None:
    """What the gradient of kv must be: of the additions of one call, those that meet are of zeros but for one."""
    for target_BW, grad_BWC in zip(target_IW.split(batch), grad_IWC.split(batch), strict=True):
        sum_XC.index_add_(0, target_BW.flatten(), grad_BWC.flatten(0, 1))
