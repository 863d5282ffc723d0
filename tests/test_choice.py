"""Which backend runs: a function of the setting and of what it is to run on, refused by name where it cannot."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_dsa.backends import Target, choose, resolve
from mcore_dsa.backends.choice import MOST_POOL_SIZE, triton_refusal
from mcore_dsa.settings import KERNELS_VARIABLE

FITS = Target("cuda", (9, 0), "3.7.1", (torch.bfloat16, torch.bfloat16), heads=32, dim=128, channels=512, pool_size=4)
HERE = Target.of(torch.device("cpu"), torch.bfloat16, heads=32, dim=128)

DOES_NOT: dict[str, tuple[dict[str, Any], str]] = {
    "device": ({"device_type": "cpu", "capability": None}, "device is cpu; accepted is cuda"),
    "capability": ({"capability": (8, 9)}, "compute capability is (8, 9); accepted are (9, x) and (10, x)"),
    "a capability that nothing is compiled for": (
        {"capability": (12, 0)},
        "compute capability is (12, 0); accepted are (9, x) and (10, x)",
    ),
    "no Triton": ({"triton": None}, "Triton is not installed; accepted is 3.7"),
    "the Triton of torch 2.11": ({"triton": "3.6.0"}, "Triton is 3.6.0; accepted is 3.7"),
    "a new Triton": ({"triton": "3.70.0"}, "Triton is 3.70.0; accepted is 3.7"),
    "fp32": ({"dtypes": (torch.float32,)}, "dtype is torch.float32; accepted is torch.bfloat16"),
    "mixed": (
        {"dtypes": (torch.bfloat16, torch.float16)},
        "dtype is torch.bfloat16, torch.float16; accepted is torch.bfloat16",
    ),
    "heads": ({"heads": 65}, "heads is 65; accepted are 1 to 64"),
    "a small dim": ({"dim": 8}, "dim is 8; accepted are multiples of 16 up to 128"),
    "an odd dim": ({"dim": 100}, "dim is 100; accepted are multiples of 16 up to 128"),
    "long pools": ({"pool_size": 17}, "pool_size is 17; accepted are at most 16"),
    "channels": ({"channels": 576}, "channels is 576; accepted are at most 512"),
    "a great dim": ({"dim": 256}, "dim is 256; accepted are multiples of 16 up to 128"),
}


@pytest.mark.parametrize("what", DOES_NOT)
def test_what_keeps_the_kernels_from_running_is_named(what: str) -> None:
    change, refusal = DOES_NOT[what]
    target = replace(FITS, **change)
    assert triton_refusal(target) == refusal
    automatic, named = choose("auto", target), choose("triton", target)
    assert (automatic.backend.name, automatic.reason, automatic.fault) == ("torch", f"not triton: {refusal}", "")
    assert (named.backend.name, named.fault) == ("torch", f"{KERNELS_VARIABLE} is 'triton' and {refusal}")
    assert resolve("auto", target).name == "torch"
    with pytest.raises(ValueError, match="MCORE_DSA_KERNELS is 'triton' and "):
        resolve("triton", target)


@given(
    st.sampled_from([(9, 0), (10, 0), (10, 3)]), st.integers(1, 64), st.integers(1, 8), st.integers(1, MOST_POOL_SIZE)
)
def test_they_run_where_they_fit_unless_torch_is_named(
    capability: tuple[int, int], heads: int, sixteenth: int, pool_size: int
) -> None:
    target = replace(FITS, capability=capability, heads=heads, dim=16 * sixteenth, pool_size=pool_size)
    for kernels, name in (("auto", "triton"), ("triton", "triton"), ("torch", "torch")):
        assert resolve(kernels, target).name == name  # type: ignore[arg-type]
        assert choose(kernels, target).fault == ""  # type: ignore[arg-type]


def test_without_scores_heads_and_channels_say_nothing() -> None:
    assert triton_refusal(replace(FITS, heads=None, dim=None)) == ""


def test_here_it_is_torch() -> None:
    assert HERE.triton is not None
    assert choose("auto", HERE).reason == "not triton: device is cpu; accepted is cuda"
    assert resolve().name == "torch"
