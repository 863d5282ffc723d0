"""Training on packs of real files: the flag on and off, recomputed, context parallel, killed and resumed."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RanksFailed, megatron_ranks, run_ranks
from train_layouts import move_by_one_place
from train_runs import FLAG, losses, metrics, run, start, tiny, trainer_of, write_files

from mcore_dsa.train.config import JobConfig

TWENTY = (
    "--pack --training.micro_batch_size 1 --training.global_batch_size 2 --training.sequence_length 128"
    " --training.steps 20 --training.decay_steps 20 --training.recompute full"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--data {write_files(tmp_path_factory.mktemp('text') / 'files')}"


def twenty_steps(run_dir: Path, text: str, ranks: int, options: str) -> None:
    """With the flag on, and off again."""
    summary = start(tiny(run_dir, text, TWENTY, options, "--compare-unsharded"), ranks)
    assert (summary["flag"], summary["group_size"]) == ("contiguous", 2)
    assert summary["unsharded_losses_bit_identical"] is True
    found = losses(run_dir)
    assert len(set(found)) == 20
    assert found[-1] < found[0] - 0.5


def test_twenty_steps_have_the_losses_of_the_unsharded_run(text: str, tmp_path: Path) -> None:
    twenty_steps(tmp_path / "run", text, 2, "")


def test_a_context_parallel_run_that_is_killed_resumes_to_the_last_bit(text: str, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    context = "--parallel.context 2"
    twenty_steps(straight, text, 4, context)
    interrupted = f"{context} --checkpoint.save_every 5"
    with pytest.raises(RanksFailed, match="killed by SIGKILL"):
        run_ranks(run_until_killed, 4, tiny(killed, text, TWENTY, interrupted), env={FLAG: "1"})
    assert [line["step"] for line in metrics(killed)] == list(range(1, 9))
    assert start(tiny(killed, text, TWENTY, interrupted, "--resume"), 4)["first_step"] == 6
    assert losses(killed) == losses(straight)
    norms = [[line["gradient_norm"] for line in metrics(folder)] for folder in (killed, straight)]
    assert norms[0] == norms[1]


def run_until_killed(config: JobConfig) -> None:
    from mcore_dsa.train import job

    class Killed(job.Trainer):
        def train_step(self) -> Any:
            if self.step == 8 and torch.distributed.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step()

    job.Trainer = Killed
    run(config)


@pytest.mark.parametrize("pack", ["", "--pack --training.sequence_length 128"], ids=["dense", "packed"])
def test_ten_steps_of_two_context_parallel_ranks_are_those_of_one(pack: str, text: str, tmp_path: Path) -> None:
    options = (
        "--parallel.tensor 1 --model.hidden_dropout 0 --training.micro_batch_size 1 --training.steps 10"
        " --training.decay_steps 10"
    )
    config = tiny(tmp_path, text, options, pack)
    (one,), (moved,) = (megatron_ranks(losses_of, 1, config, move) for move in (False, True))
    split = replace(config, parallel=replace(config.parallel, context=2))
    two, again = megatron_ranks(losses_of, 2, split, False, cp=2)
    assert two == again
    far = [abs(left - right) for left, right in zip(two, one, strict=True)]
    near = [abs(left - right) for left, right in zip(moved, one, strict=True)]
    # Sums over ranks round as other weights do: 1.0 of that dense, 1.3 packed (M).
    assert max(far) <= 4 * max(near)


def losses_of(config: JobConfig, move: bool) -> list[float]:
    trainer, _ = trainer_of(config)
    if move:
        move_by_one_place(trainer)
    return [trainer.train_step().loss for _ in range(config.training.steps)]
