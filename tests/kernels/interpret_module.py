"""The module with every step of it in Triton: rows sharded or not, attention cut by heads or by rows, against torch."""

import os
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from models import attentions, config, gpt, tokens

from mcore_dsa.backends import Backend, Choice
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.backends.triton import TritonBackend
from mcore_dsa.megatron import attention
from mcore_dsa.settings import ATTEND_SHARD_VARIABLE, PARTITION_VARIABLE

# Pools of 4, of which a row takes one: the rows from the ninth token on are scored.
ROWS, TOPK = 20, 4


class Witness:
    """A backend whose functions are counted."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.called = backend, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.called.add(name)
        return getattr(self.backend, name)


def step(backend: Backend, partition: str, attend_shard: str) -> tuple[Any, set[str]]:
    """Loss and gradients of one step of a model in bf16, and what was asked of the backend."""
    os.environ |= {PARTITION_VARIABLE: partition, ATTEND_SHARD_VARIABLE: attend_shard}
    witness = Witness(backend)
    attention.choose = lambda *_: Choice(witness)  # type: ignore[arg-type]
    torch.manual_seed(1234)
    model_parallel_cuda_manual_seed(1234)
    model = gpt(config(num_layers=1, dsa_indexer_topk=TOPK, params_dtype=torch.bfloat16, bf16=True))
    ids = tokens()[:1, : ROWS + 1]
    loss = model(ids[:, :-1], None, None, labels=ids[:, 1:]).float().mean()
    loss.backward()
    assert attentions(model)[0].counters.scored_rows > 0
    gradients = {name: x.grad.float() for name, x in model.named_parameters() if x.grad is not None}
    return (loss.detach(), gradients), witness.called


def steps() -> None:
    (loss, gradients), called = step(TritonBackend(), "1", "heads")
    assert called >= {"compress", "select", "selection_faults", "attend", "attend_backward", "fingerprint"}
    (of_rows, _), _ = step(TritonBackend(), "off", "rows")
    assert torch.equal(of_rows, loss)
    (of_torch, expected), _ = step(TorchBackend(), "1", "heads")
    torch.testing.assert_close(loss, of_torch, rtol=2e-3, atol=0)
    assert expected.keys() == gradients.keys()
    for name, gradient in expected.items():
        assert float((gradients[name] - gradient).norm()) <= 0.05 * float(gradient.norm()), name


@pytest.mark.filterwarnings("ignore")
def test_a_step_is_that_of_torch() -> None:
    megatron_ranks(steps, 2, tp=2, timeout=240)
