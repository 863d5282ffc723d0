"""Sparse attention in Triton on one CUDA device: float64, the torch path, equal bits, lists of many rows, refusals."""

import functools
from dataclasses import replace

import pytest
import torch
from attend_bounds import error_bounds
from attend_cases import Case, assert_equal
from on_device import DEVICE, moved, requested_at_peak
from test_attention import MIB, REFUSED, SEGMENTS, assert_device_lives
from torch import Tensor

from mcore_dsa.attend import attend
from mcore_dsa.backends import AttentionCall
from mcore_dsa.backends.triton import TritonBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# What a result's rounding, and the two bf16 parts of a weight, leave out; products of bf16 are summed in fp32, in which
# matrix instructions cut off where IEEE 754 rounds: the bounds count every addition, and so leave room for that.
ROUNDOFF, SPLIT = 2.0**-8, 2.0**-16


@functools.cache
def glm_case(heads: int, rows: int = 64) -> Case:
    """GLM-5.3-Flash's latents, bf16; rows that select up to 512 pools and their tail."""
    case = Case.random(SEGMENTS, 8000, heads=heads, channels=512, budget=512, rows=rows)
    return moved(replace(case, scale=512**-0.5).to(torch.bfloat16))


def attended(case: Case, q: Tensor, kv: Tensor, attend_bytes: int = 1 << 28) -> Tensor:
    call = AttentionCall(case.layout, case.layout.bounds(case.position), case.scale, case.tail, attend_bytes)
    return attend(q, kv, case.selection, call, backend=TritonBackend())


def run(case: Case, **options: int) -> tuple[Tensor, Tensor, Tensor]:
    q, kv = case.q.detach().requires_grad_(), case.kv.detach().requires_grad_()
    out = attended(case, q, kv, **options)
    return out.detach(), *torch.autograd.grad(out, (q, kv), case.out_grad)


def assert_within_bounds(case: Case) -> None:
    """Against float64 and against the torch path, on the CPU: what a device makes of float64 is not in question."""
    host = moved(case, "cpu")
    exact = host.to(torch.float64)
    allowed = error_bounds(exact, out=ROUNDOFF, split=SPLIT)
    for ours, torchs, want, bound in zip(run(case), host.run(), exact.run_oracle(), allowed, strict=True):
        assert bool(((ours.cpu() - want).abs() <= bound).all())
        assert bool(((ours.cpu().double() - torchs.double()).abs() <= 2 * bound).all())


@pytest.mark.parametrize("heads", [1, 8, 24, 64])
def test_within_the_bound_of_float64_at_the_published_sizes(heads: int) -> None:
    assert_within_bounds(glm_case(heads, rows=24))


@pytest.mark.parametrize(
    "options",
    [
        {"pool_size": 1, "budget": 70, "heads": 3, "channels": 20},
        {"pool_size": 5, "budget": 9, "heads": 17, "channels": 64},
        {"pool_size": 4, "budget": 3, "heads": 40, "channels": 16, "tail": False},
        {"pool_size": 4, "budget": 0, "heads": 2, "channels": 128},
    ],
)
def test_within_the_bound_of_float64_in_other_geometries(options: dict[str, int]) -> None:
    case = Case.random([[(0, 70), (70, 73), (80, 150)], [(3, 140)]], 150, **options)
    assert_within_bounds(moved(case.to(torch.bfloat16)))


def test_a_pool_that_every_row_selects() -> None:
    """One program adds what 4,093 rows contribute."""
    case = Case.random([[(0, 4096)]], 4096, heads=8, channels=64, budget=3)
    case.selection[0, 3:, 0] = 0
    case.selection[0, 3:, 1:] = -1
    assert_within_bounds(moved(case.to(torch.bfloat16)))


@pytest.mark.parametrize("heads", [8, 64])
def test_a_hundred_runs_give_equal_bits(heads: int) -> None:
    case = glm_case(heads)
    expected = run(case)
    for _ in range(100):
        assert_equal(run(case), expected)


def test_no_budget_and_no_pack_moves_a_bit() -> None:
    case = glm_case(8)
    whole = run(case)
    least = TritonBackend.smallest_attend_bytes(batch=2, heads=8, channels=512, dtype=torch.bfloat16, slots=2051)
    for attend_bytes in (least, 5 * least, 1 << 33):
        assert_equal(run(case, attend_bytes=attend_bytes), whole)
    alone = replace(
        case,
        q=case.q[:, 1:],
        kv=case.kv[:, 1:],
        out_grad=case.out_grad[:, 1:],
        selection=case.selection[1:],
        layout=moved(Case.random(SEGMENTS[1:], 8000, heads=1, rows=1).layout),
    )
    assert_equal(run(alone), tuple(x[:, 1:] for x in whole))


def test_one_gradient_alone_is_the_same() -> None:
    case = glm_case(8)
    _, q_grad, kv_grad = run(case)
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(attended(case, q, case.kv), q, case.out_grad)[0], q_grad)
    assert torch.equal(torch.autograd.grad(attended(case, case.q, kv), kv, case.out_grad)[0], kv_grad)


def test_backward_stays_under_its_byte_budget() -> None:
    """Beside the gradients, the fp32 sum of those of latents, and a number a row and head."""
    case = glm_case(8)
    q, kv = case.q.detach().requires_grad_(), case.kv.detach().requires_grad_()
    least = TritonBackend.smallest_attend_bytes(batch=2, heads=8, channels=512, dtype=torch.bfloat16, slots=2051)
    beside = q.nbytes + kv.nbytes + 2 * kv.nbytes + kv[0, 0].nbytes * 2 + q[..., 0].nbytes * 2
    for attend_bytes in (least, 10 * least):
        out = attended(case, q, kv, attend_bytes)
        peak, _ = requested_at_peak(lambda out=out: torch.autograd.grad(out, (q, kv), case.out_grad))
        # What a sort takes besides is the library's own.
        assert peak - beside <= attend_bytes + MIB
        assert peak > attend_bytes // 2


@pytest.mark.parametrize("heads", [8, 16, 64])
def test_a_row_and_head_alone_is_itself_in_every_place(heads: int) -> None:
    """That a column of a matrix instruction does not matter is documented by nobody."""
    case = glm_case(heads)
    out, q_grad, _ = run(case)
    for head in range(heads):
        part = slice(head, head + 1)
        few = replace(case.rows(slice(40, 44)), q=case.q[40:44, :, part], out_grad=case.out_grad[40:44, :, part])
        assert_equal(run(few)[:2], (out[40:44, :, part], q_grad[40:44, :, part]))


def test_rows_without_tokens_are_zeros_and_padding_is_never_read() -> None:
    case = moved(Case.random([[(5, 21)], [(0, 0)]], 24, rows=200, channels=512).to(torch.bfloat16))
    padding = torch.ones(24, 2, dtype=torch.bool, device=DEVICE)
    padding[5:21, 0] = False
    expected = run(case)
    case.kv[padding] = float("nan")
    out, q_grad, kv_grad = run(case)
    assert_equal((out, q_grad, kv_grad), expected)
    empty = (case.tokens() < 0).all(-1).T
    assert not out[empty].any()
    assert not q_grad[empty].any()
    assert not kv_grad[padding].any()


@pytest.mark.parametrize(("row", "ids"), [(row, ids) for row, ids, _ in REFUSED.values()], ids=REFUSED)
def test_bad_ids_are_refused_and_lead_nowhere(row: int, ids: list[int]) -> None:
    case = moved(Case.random([[(0, 40)], [(3, 37)]], 40, channels=512).to(torch.bfloat16))
    case.selection[1, row] = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="selection_BSK"):
        attended(case, case.q, case.kv)
    assert_device_lives()
