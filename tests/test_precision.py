"""`full_precision` under every way torch offers to lower the precision of fp32 products."""

import itertools
import threading

import pytest
import torch

from mcore_dsa.precision import full_precision

MATMULS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)


def readings() -> list[str]:
    """All that a user can read of the settings, errors of torch included."""
    values = [torch.backends.fp32_precision, *(matmul.fp32_precision for matmul in MATMULS)]
    for read in (torch.get_float32_matmul_precision, lambda: str(torch.backends.cuda.matmul.allow_tf32)):
        try:
            values.append(read())
        except RuntimeError as error:
            values.append(str(error))
    return values


@pytest.fixture(autouse=True)
def _restored():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    for matmul in MATMULS:
        matmul.fp32_precision = "none"


CASES = [
    *itertools.product([None, "highest", "high", "medium"], ["none"], [None], [None]),
    *itertools.product([None, "high"], ["ieee", "tf32", "bf16"], [None, "tf32", "ieee"], [None, "bf16", "tf32"]),
]


@pytest.mark.parametrize(("old", "generic", "cuda", "mkldnn"), CASES)
def test_pins_and_restores(old: str | None, generic: str, cuda: str | None, mkldnn: str | None) -> None:
    if old is not None:
        torch.set_float32_matmul_precision(old)
    torch.backends.fp32_precision = generic
    for matmul, precision in zip(MATMULS, (cuda, mkldnn), strict=True):
        if precision is not None:
            matmul.fp32_precision = precision
    before = readings()
    with full_precision("cpu"):
        assert all(matmul.fp32_precision in ("none", "ieee") for matmul in MATMULS)
        torch.randn(2, 3, 4) @ torch.randn(2, 4, 5)
        with full_precision("cpu"):
            pass
        assert all(matmul.fp32_precision in ("none", "ieee") for matmul in MATMULS)
    assert readings() == before
    with pytest.raises(ZeroDivisionError), full_precision("cpu"):
        _ = 1 / 0
    assert readings() == before


def test_old_names_stay_usable_inside() -> None:
    torch.set_float32_matmul_precision("medium")
    with full_precision("cpu"):
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    assert torch.get_float32_matmul_precision() == "medium"


def test_inherited_setting_still_inherits() -> None:
    torch.backends.fp32_precision = "tf32"
    with full_precision("cpu"):
        pass
    torch.backends.fp32_precision = "ieee"
    assert [matmul.fp32_precision for matmul in MATMULS] == ["ieee", "ieee"]


def test_the_last_of_several_threads_restores() -> None:
    torch.set_float32_matmul_precision("medium")
    entered, leave, seen = threading.Event(), threading.Event(), []

    def other() -> None:
        with full_precision("cpu"):
            entered.set()
            leave.wait(10)
            seen.append(MATMULS[1].fp32_precision)

    thread = threading.Thread(target=other)
    with full_precision("cpu"):
        thread.start()
        assert entered.wait(10)
    # The thread is inside still: what this one found must not come back under it.
    assert MATMULS[1].fp32_precision == "ieee"
    leave.set()
    thread.join()
    assert seen == ["ieee"]
    assert torch.get_float32_matmul_precision() == "medium"


def test_autocast_is_off_inside_only() -> None:
    a = torch.randn(3, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision("cpu"):
            assert (a @ a.T).dtype == torch.float32
        assert (a @ a.T).dtype == torch.bfloat16


def test_lowered_precision_moves_no_bit() -> None:
    a, b = torch.randn(8, 64, 512), torch.randn(8, 512, 300)
    expected = a @ b
    torch.set_float32_matmul_precision("medium")
    with full_precision("cpu"):
        assert torch.equal(a @ b, expected)
