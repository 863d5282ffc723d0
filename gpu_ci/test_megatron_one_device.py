"""Megatron's model on one CUDA device: training repeats to the last bit, and two ranks that share it train alike."""

import os
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from models import OFF, ON, Run, assert_equal, attentions, config, gpt
from on_device import DEVICE
from test_megatron_equality import assert_same_training, assert_worth_comparing, train_ten

from mcore_dsa.backends import Target
from mcore_dsa.backends.choice import triton_refusal
from mcore_dsa.settings import KERNELS_VARIABLE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Weights drawn on the device. Deterministic: the gradient of the embedding is summed in an order of its own.
ON_CUDA: dict[str, Any] = {"use_cpu_initialization": False, "deterministic_mode": True}
BF16 = {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
PRECISIONS = pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
TIMEOUT_S = 240.0


def test_training_repeats_to_the_last_bit() -> None:
    (first,), (second,) = (
        megatron_ranks(train_ten, 1, ON_CUDA | BF16, env=OFF, backend="nccl", device="cuda", timeout=TIMEOUT_S)
        for _ in range(2)
    )
    assert_worth_comparing([first], 1)
    for part in ("selections", "logits", "losses", "gradients", "parameters"):
        assert_equal(getattr(first, part), getattr(second, part), part)


def trained_with(kernels: str) -> tuple[str, Run]:
    """What a model in bf16 computes with, and its training."""
    os.environ[KERNELS_VARIABLE] = kernels
    return attentions(gpt(config(**ON_CUDA, **BF16)))[0].backend.name, train_ten(ON_CUDA | BF16)


def test_bf16_trains_with_the_kernels_and_near_torch() -> None:
    """Of what follows a first step, a score that rounds otherwise may select another pool."""
    if refused := triton_refusal(Target.of(DEVICE, torch.bfloat16)):
        pytest.skip(refused)
    kernels = ("auto", "torch")
    (ours, theirs) = (
        megatron_ranks(trained_with, 1, word, env=OFF, backend="nccl", device="cuda", timeout=TIMEOUT_S)[0]
        for word in kernels
    )
    assert (ours[0], theirs[0]) == ("triton", "torch")
    torch.testing.assert_close(ours[1].losses[0], theirs[1].losses[0], rtol=2e-3, atol=0)


@PRECISIONS
def test_two_ranks_that_share_the_device_train_as_unsharded(precision: dict[str, Any]) -> None:
    """TP=2 over gloo, flag off against on."""
    off, on = (trained_over_gloo(precision, env) for env in (OFF, ON))
    assert_worth_comparing(off, 2)
    assert_same_training(off, on, "contiguous")


def trained_over_gloo(precision: dict[str, Any], env: dict[str, str]) -> list[Run]:
    options = ON_CUDA | precision
    return megatron_ranks(train_ten, 2, options, tp=2, env=env, backend="gloo", device="cuda", timeout=TIMEOUT_S)
