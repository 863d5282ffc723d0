"""Weights that came apart on one rank: named on all ranks of the world, whatever the ranks were to have in common."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks, run_ranks
from megatron.core import parallel_state
from models import config, gpt
from torch import nn
from train_runs import FLAG, run, tiny, trainer_of

from mcore_dsa.megatron import check_replicas
from mcore_dsa.megatron.replicas import _differing
from mcore_dsa.settings import DRIFT_VARIABLE
from mcore_dsa.train.config import JobConfig

EXPERTS = {
    "num_layers": 1,
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_token_dispatcher_type": "allgather",
}


def moved_on_the_last_rank(names: list[str]) -> dict[str, str]:
    """What this rank is told of each weight of these names, moved by one bit on the last rank and put back."""
    shards = parallel_state.get_expert_model_parallel_world_size()
    chunks = [gpt(config(**EXPERTS, expert_model_parallel_size=shards))]
    weights, said = dict(chunks[0].named_parameters()), {}
    check_replicas(chunks)
    for name in names:
        (weight,) = (weight for full, weight in weights.items() if re.search(name, full))
        bits = weight.data.view(torch.int32).view(-1)
        if dist.get_rank() == dist.get_world_size() - 1:
            bits[-1] ^= 1
        with pytest.raises(ValueError, match=r"^drift between replicas of weights: ") as raised:
            check_replicas(chunks)
        said[name] = str(raised.value)
        if dist.get_rank() == dist.get_world_size() - 1:
            bits[-1] ^= 1
    check_replicas(chunks)
    return said


@pytest.mark.parametrize(
    ("ranks", "sizes", "holders"),
    [
        # Whole over tensor parallelism; cut there; an expert's, of ranks that hold the same experts.
        (4, {"tp": 2}, {"router": [2, 3], r"q_up_proj": [1, 3], r"experts.0.linear_fc1": [1, 3]}),
        (4, {"ep": 2}, {"router": [0, 1, 2, 3], "linear_wk": [0, 1, 2, 3], r"experts.0.linear_fc1": [1, 3]}),
        (2, {"cp": 2}, {"q_layernorm": [0, 1], "embedding": [0, 1]}),
    ],
)
def test_a_bit_on_one_rank_is_told_on_every_rank(
    ranks: int, sizes: dict[str, int], holders: dict[str, list[int]]
) -> None:
    told = megatron_ranks(moved_on_the_last_rank, ranks, list(holders), **sizes)
    assert all(of_rank == told[0] for of_rank in told)
    for name, group in holders.items():
        sentence = told[0][name]
        others = ", ".join(map(str, group[:-1]))
        assert re.search(
            rf"{name}\S* is '\w{{16}}' on ranks \[{others}\], '\w{{16}}' on ranks \[{ranks - 1}\]", sentence
        )


def before_a_step(config: JobConfig, name: str) -> list[str]:
    """What ranks say of a trainable weight that is another on the last of them before a step, and no more after it."""
    trainer, _ = trainer_of(config)
    trainer.train_step()
    weight = next(weight for full, weight in trainer.chunks[0].named_parameters() if name in full)
    if dist.get_rank() == 1:
        weight.data.view(-1)[:7].add_(1)
    with pytest.raises(ValueError, match=r"^drift between replicas of weights: ") as raised:
        trainer.train_step()
    return [str(raised.value), str(trainer.step)]


@pytest.mark.parametrize(
    ("sizes", "options", "name"),
    [
        ({}, "--parallel.tensor 1", "linear_fc1"),
        ({"cp": 2}, "--parallel.tensor 1 --parallel.context 2", "linear_fc1"),
        ({"tp": 2}, "--training.dtype bf16", "q_layernorm"),
    ],
)
def test_no_update_hides_a_weight_that_reached_a_gradient(
    sizes: dict[str, int], options: str, name: str, tmp_path: Path
) -> None:
    config = tiny(tmp_path, "--model.num_layers 1 --training.micro_batch_size 2", options)
    told = megatron_ranks(before_a_step, 2, config, name, env={FLAG: "1", DRIFT_VARIABLE: "1"}, **sizes)
    assert told[0] == told[1]
    assert re.search(rf"{name}\S* is '\w{{16}}' on ranks \[0\], '\w{{16}}' on ranks \[1\]", told[0][0])
    assert told[0][1] == "1"


def with_another_number(config: JobConfig) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DRIFT_VARIABLE, str(1 + dist.get_rank()))
        with pytest.raises(ValueError, match=DRIFT_VARIABLE) as raised:
            run(config)
    return str(raised.value)


def test_ranks_that_would_compare_in_other_steps_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(with_another_number, 2, tiny(tmp_path, "--parallel.tensor 1"), env={FLAG: "1"}):
        assert said == f"{DRIFT_VARIABLE} is 2 on rank 1; accepted is rank 0's, 1"


def of_another_model() -> str:
    with pytest.raises(ValueError, match="drift between replicas") as raised:
        check_replicas([nn.Linear(1, 1 + dist.get_rank())])
    return str(raised.value)


def test_weights_of_another_model_are_not_compared() -> None:
    for said in megatron_ranks(of_another_model, 2, tp=2):
        assert "ranks [0, 1] hold weights of other names, shapes or dtypes; accepted are those of one model" in said


def many() -> list[str]:
    """Forty weights of a flat buffer, of which the second rank holds others."""
    flat = torch.arange(400, dtype=torch.float32)
    if dist.get_rank() == 1:
        flat += 1
    named = [(f"weight {index}", flat[1 + 7 * index : 8 + 7 * index]) for index in range(40)]
    alike = [("alike", torch.ones(3, dtype=torch.bfloat16)[1:])]
    assert _differing(alike, dist.group.WORLD) == []
    return _differing([*named, *alike], dist.group.WORLD)


def test_each_weight_that_differs_is_told() -> None:
    first, second = run_ranks(many, 2)
    assert first == second
    assert [sentence.split(" is ")[0] for sentence in first] == [f"weight {index}" for index in range(40)]


def with_many_weights() -> str:
    chunk = nn.ParameterList([nn.Parameter(torch.full((2,), float(dist.get_rank()))) for _ in range(20)])
    with pytest.raises(ValueError, match="drift between replicas") as raised:
        check_replicas([chunk, nn.Linear(1, 1)])
    return str(raised.value)


def test_a_message_names_some_and_counts_the_rest() -> None:
    for said in megatron_ranks(with_many_weights, 2, tp=2):
        assert said.count("chunk 0, ") == 8
        assert said.endswith("; and 12 more")
