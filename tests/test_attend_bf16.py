"""Attention of bf16 operands as they are multiplied on CUDA, with products that torch has there stood in for here."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from attend_bounds import error_bounds
from attend_cases import Case, assert_equal, smallest_budget
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from layouts import segmentations
from test_attend import GEOMETRIES
from torch import Tensor

from mcore_dsa import precision
from mcore_dsa.backends.torch.scoring import operands_of

# What a result's rounding, and the two bf16 parts of a weight, leave out.
ROUNDOFF, SPLIT = 2.0**-8, 2.0**-16


def multiply(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    assert (left.dtype, right.dtype, dtype, out.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    return torch.bmm(left.float(), right.float(), out=out)


def multiply_and_add(
    total: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, beta: float = 1, out: Tensor
) -> Tensor:
    assert (left.dtype, right.dtype, dtype, out.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    return torch.baddbmm(total, left.float(), right.float(), beta=beta, out=out)


@pytest.fixture(autouse=True)
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cuda, module = torch.device("cuda"), import_module("mcore_dsa.backends.torch.attend")
    monkeypatch.setattr(module, "operands_of", lambda _, *dtypes: operands_of(cuda, *dtypes))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("bmm.dtype_out", multiply, "CPU")
        library.impl("baddbmm.dtype_out", multiply_and_add, "CPU")
        yield


@given(segmentations(max_tokens=40, max_batch=2), GEOMETRIES)
@hypothesis_settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_within_the_bound_of_float64_whatever_the_budget(segmentation: Any, geometry: Any) -> None:
    case = Case.random(*segmentation, **geometry).to(torch.bfloat16)
    got, exact = case.run(), case.to(torch.float64)
    bounds = error_bounds(exact, out=ROUNDOFF, split=SPLIT)
    for ours, want, bound in zip(got, exact.run_oracle(), bounds, strict=True):
        assert ours.dtype == torch.bfloat16
        assert bool(((ours - want).abs() <= bound).all())
    assert_equal(case.run(attend_bytes=smallest_budget(case)), got)


def test_the_switches_of_the_process_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned() -> None:
        raise AssertionError("the precision of the process is set")

    monkeypatch.setattr(precision, "_pin_products", pinned)
    case = Case.random([[(0, 9)]], 9)
    case.to(torch.bfloat16).run()
    for other in (case, replace(case, kv=case.kv.bfloat16())):
        with pytest.raises(AssertionError, match="precision of the process"):
            other.run()
