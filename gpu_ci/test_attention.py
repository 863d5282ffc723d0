"""Sparse attention on one CUDA device: its oracle, its determinism, its byte budget, its refusals."""

import functools
from dataclasses import replace

import pytest
import torch
from attend_bounds import error_bounds
from attend_cases import Case, add_row_by_row, assert_equal, random_slots, smallest_budget
from hypothesis import given, settings
from layouts import segmentations
from on_device import DEVICE, moved, requested_at_peak
from test_attend import GEOMETRIES
from torch import Tensor

from mcore_dsa import expand_selection
from mcore_dsa.attend import attend
from mcore_dsa.backends import AttentionCall
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.backends.torch.attend import _add_in_row_order
from mcore_dsa.backends.torch.slots import Slots
from mcore_dsa.settings import DEFAULT_BYTES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20
SEGMENTS = [[(0, 5000), (5000, 8000)], [(3, 7990)]]


@functools.cache
def glm_case(rows: int = 96) -> Case:
    """GLM-5.3-Flash's latents and eight of its heads, fp32; rows that select up to 512 pools and their tail."""
    return moved(Case.random(SEGMENTS, 8000, heads=8, channels=512, budget=512, rows=rows))


def assert_near_float64(case: Case, **options: int) -> None:
    """The oracle's own error in the case's dtype is what that dtype costs; another order of sums may cost more."""
    eps = torch.finfo(case.q.dtype).eps
    for got, dense, want in zip(
        case.run(**options), case.run_oracle(), case.to(torch.float64).run_oracle(), strict=True
    ):
        assert got.dtype == case.q.dtype
        error, size = (float(x.abs().max()) if x.numel() else 0.0 for x in (dense - want, want))
        assert bool(((got - want).abs() <= 8 * error + 32 * eps * size).all())


@settings(max_examples=30)
@given(segmentations(), GEOMETRIES)
def test_equals_the_oracle(segmentation, geometry) -> None:
    case = moved(Case.random(*segmentation, **geometry))
    assert_near_float64(case)
    if case.q.numel():
        assert_near_float64(case, attend_bytes=3 * smallest_budget(case))
    # fp64 inputs run in fp64: sums of at most some hundred terms of order one.
    double = case.to(torch.float64)
    torch.testing.assert_close(double.run(), double.run_oracle(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_oracle_at_the_published_sizes(dtype: torch.dtype) -> None:
    assert_near_float64(glm_case().to(dtype))


def test_bf16_operands_of_the_torch_path() -> None:
    """By that path, where the public function may take others' kernels: within derived bounds, equal in equal runs."""
    case = Case.random([[(0, 70), (70, 73), (80, 150)], [(3, 140)]], 150, heads=9, channels=64, budget=9)
    case = case.to(torch.bfloat16)
    exact, there = case.to(torch.float64), moved(case)
    q, kv = there.q.requires_grad_(), there.kv.requires_grad_()
    call = AttentionCall(there.layout, there.layout.bounds(there.position), there.scale, there.tail, 1 << 24)
    results = []
    for _ in range(2):
        out = attend(q, kv, there.selection, call, backend=TorchBackend())
        results.append((out.detach(), *torch.autograd.grad(out, (q, kv), there.out_grad)))
    assert_equal(*results)
    bounds = error_bounds(exact, out=2.0**-8, split=2.0**-16)
    for ours, want, bound in zip(results[0], exact.run_oracle(), bounds, strict=True):
        assert bool(((ours.cpu() - want).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_runs_give_equal_bits(dtype: torch.dtype) -> None:
    """Many rows that add to the same keys, in one chunk and in many."""
    few = moved(Case.random([[(0, 700)], [(1, 600)]], 700, heads=8, channels=64, budget=100))
    for case in (few.to(dtype), glm_case().to(dtype)):
        for attend_bytes in (DEFAULT_BYTES, 5 * smallest_budget(case)):
            expected = case.run(attend_bytes=attend_bytes)
            for _ in range(3):
                assert_equal(case.run(attend_bytes=attend_bytes), expected)


def test_neither_tf32_nor_autocast_moves_a_bit() -> None:
    case = glm_case()
    expected = case.run()
    torch.set_float32_matmul_precision("medium")
    try:
        assert_equal(case.run(), expected)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert_equal(case.run(), expected)


@pytest.mark.parametrize(("items", "width", "channels"), [(6, 5, 33), (64, 160, 512), (1000, 67, 80)])
def test_the_gradient_of_kv_is_summed_in_row_order(items: int, width: int, channels: int) -> None:
    """In chunks of any length, what the CPU gets row by row: float addition in another order would show.

    Above 32 channels. For fewer, torch's kernel first adds what a chunk brings, and then that to the sum.
    """
    torch.manual_seed(0)
    batch, spare = 2, 400
    slots, grad = random_slots(items, width, channels, tokens=200, batch=batch)
    expected = torch.zeros(spare + 1, channels)
    add_row_by_row(expected, slots.token_IW.masked_fill(slots.empty_I1, spare), grad, batch)
    for step in (batch, 7 * batch, items):
        total = torch.zeros(spare + 1, channels, device=DEVICE)
        for begin in range(0, items, step):
            part = slice(begin, begin + step)
            chunk = Slots(slots.token_IW[part], slots.unused_IW[part], slots.empty_I1[part])
            _add_in_row_order(total, moved(chunk), moved(grad[part]))
        assert torch.equal(total[:spare].cpu(), expected[:spare])


def passes(case: Case, attend_bytes: int) -> tuple[int, int]:
    """Peaks of forward and backward, without outputs and the one fp32 sum of kv's gradient, a row longer than kv."""
    case = replace(case, q=case.q.detach().requires_grad_(), kv=case.kv.detach().requires_grad_())
    bounds = case.layout.bounds(case.position)
    case.attend(bounds)
    forward, out = requested_at_peak(functools.partial(case.attend, bounds, attend_bytes=attend_bytes))
    gradients = functools.partial(torch.autograd.grad, out, (case.q, case.kv), case.out_grad)
    backward, _ = requested_at_peak(gradients)
    sums = case.kv.numel() * 4 + (0 if case.kv.dtype == torch.float32 else case.kv.nbytes)
    return forward - out.nbytes, backward - case.q.nbytes - sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attend_bytes", [64 * MIB, DEFAULT_BYTES])
def test_both_passes_stay_under_their_byte_budget(dtype: torch.dtype, attend_bytes: int) -> None:
    case = glm_case(400).to(dtype)
    # The matrix library keeps a workspace for each thread that multiplies, from its first product on.
    case.rows(slice(0, 2)).run()
    forward, backward = passes(case, attend_bytes)
    assert forward <= attend_bytes
    assert attend_bytes // 2 < backward <= attend_bytes


POOLS = 10
REFUSED: dict[str, tuple[int, list[int], str]] = {
    "behind the last pool": (39, [POOLS, -1, -1], "accepted are -1 and"),
    "far behind it": (39, [2**31 - 1, -1, -1], "accepted are -1 and"),
    "below -1": (39, [-2, -1, -1], "accepted are -1 and"),
    "of the future": (0, [POOLS - 1, -1, -1], "cannot see"),
    "no pool of the sample": (36, [0, 8, 9], "cannot see"),
}


@pytest.mark.parametrize(("row", "ids", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_ids_are_refused_before_the_device_asserts(row: int, ids: list[int], said: str) -> None:
    case = moved(Case.random([[(0, 40)], [(3, 37)]], 40))
    case.selection[1, row] = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match=said):
        case.out()
    with pytest.raises(ValueError, match=said):
        expand_selection(case.selection, case.layout, case.position, always_select_tail=True)
    assert_device_lives()


def test_ids_out_of_order_are_refused() -> None:
    for ids in ([1, 0, -1], [2, 2, 3], [-1, 0, 1]):
        case = moved(Case.random([[(0, 40)]], 40))
        case.selection[0, 39] = torch.tensor(ids, dtype=torch.int32, device=DEVICE)
        with pytest.raises(ValueError, match="ascending ids"):
            case.out()
    assert_device_lives()


def test_tensors_of_another_device_are_refused() -> None:
    case = moved(Case.random([[(0, 40)]], 40))
    for name in ("q", "kv", "selection", "position"):
        with pytest.raises(ValueError, match="accepted is the layout's device, cuda:0"):
            replace(case, **{name: getattr(case, name).cpu()}).out()
    assert_device_lives()


def assert_device_lives() -> None:
    """After a device assert every further call on the device fails."""
    ones: Tensor = torch.ones(1000, device=DEVICE)
    torch.cuda.synchronize()
    assert float(ones.sum()) == 1000
