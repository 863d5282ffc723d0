"""The multi-rank harness: what a rank returns, raises or never does arrives in the test."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import RanksFailed, megatron_ranks, run_ranks


def rank_and_tensor() -> tuple[int, torch.Tensor]:
    rank = dist.get_rank()
    # Later ranks end first: the order of the list is not the order of arrival.
    time.sleep(0.1 * (dist.get_world_size() - rank))
    return rank, torch.full((3,), rank, dtype=torch.bfloat16)


def sum_over(group_ranks: list[list[int]]) -> int:
    groups = [dist.new_group(ranks) for ranks in group_ranks]
    mine = next(group for group, ranks in zip(groups, group_ranks, strict=True) if dist.get_rank() in ranks)
    total = torch.tensor(2 ** dist.get_rank())
    dist.all_reduce(total, group=mine)
    return int(total)


def fail_on(failing: int) -> None:
    if dist.get_rank() == failing:
        raise ArithmeticError(f"wrong sum on {failing}")
    dist.barrier()


def hang_on(hanging: int) -> None:
    if dist.get_rank() == hanging:
        time.sleep(600)


def die_on(dying: int) -> None:
    if dist.get_rank() == dying:
        os._exit(7)


def unpicklable() -> Any:
    return lambda: None


def environment(name: str) -> str | None:
    return os.environ.get(name)


def layout() -> tuple[int, ...]:
    from megatron.core import parallel_state as ps

    return (
        ps.get_tensor_model_parallel_rank(),
        ps.get_pipeline_model_parallel_rank(),
        ps.get_data_parallel_rank(),
        ps.get_context_parallel_world_size(),
    )


def test_values_come_back_in_rank_order() -> None:
    results = run_ranks(rank_and_tensor, 3)
    assert [rank for rank, _ in results] == [0, 1, 2]
    for rank, tensor in results:
        assert torch.equal(tensor, torch.full((3,), rank, dtype=torch.bfloat16))


def test_sub_groups_reduce_apart() -> None:
    assert run_ranks(sum_over, 4, [[0, 2], [1, 3]]) == [5, 10, 5, 10]


def test_traceback_of_the_failing_rank_comes_first() -> None:
    with pytest.raises(RanksFailed) as caught:
        run_ranks(fail_on, 3, 1)
    message = str(caught.value)
    assert message.index("rank 1 failed") < message.index("ArithmeticError: wrong sum on 1")
    assert "in fail_on" in message
    for other in ("rank 0 failed", "rank 2 failed"):
        assert other not in message or message.index(other) > message.index("wrong sum on 1")


def test_hung_rank_is_killed_and_named_with_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"ranks \[1\] hung: killed after 3 s") as caught:
        run_ranks(hang_on, 2, 1, timeout=3.0)
    assert time.monotonic() - start < 30
    assert "in hang_on" in str(caught.value)


def test_dead_rank_is_named_with_its_exit_code() -> None:
    with pytest.raises(RanksFailed, match=r"rank 0 failed:\nthe process ended without a report: exit code 7"):
        run_ranks(die_on, 2, 0)


def test_value_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(RanksFailed, match="the value cannot be sent"):
        run_ranks(unpicklable, 1)


def test_environment_for_all_or_for_each_rank() -> None:
    name = "MCORE_DSA_HARNESS_TEST"
    assert run_ranks(environment, 2, name, env={name: "x"}) == ["x", "x"]
    assert run_ranks(environment, 2, name, env=[{name: "x"}, {name: None}]) == ["x", None]
    assert name not in os.environ
    with pytest.raises(ValueError, match="env has 1 entries"):
        run_ranks(environment, 2, name, env=[{}])


def test_nccl_needs_a_device_for_each_rank() -> None:
    with pytest.raises(ValueError, match="nccl"):
        run_ranks(rank_and_tensor, torch.cuda.device_count() + 1, backend="nccl", device="cuda")


def test_megatron_layout_follows_the_sizes() -> None:
    assert megatron_ranks(layout, 4, tp=2) == [(0, 0, 0, 1), (1, 0, 0, 1), (0, 0, 1, 1), (1, 0, 1, 1)]
    assert megatron_ranks(layout, 2, pp=2) == [(0, 0, 0, 1), (0, 1, 0, 1)]
    assert megatron_ranks(layout, 2, cp=2) == [(0, 0, 0, 2), (0, 0, 0, 2)]
