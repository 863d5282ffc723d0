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

PACKED = (
    "--pack --training.micro_batch_size 1 --training.global_batch_size 2 --training.sequence_length 128"
    " --training.recompute full"
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"--data {write_files(tmp_path_factory.mktemp('text') / 'files')}"


def test_twenty_steps_have_the_losses_of_the_unsharded_run(text: str, tmp_path: Path) -> None:
    twenty = "--training.steps 20 --training.decay_steps 20 --compare-unsharded"
    summary = start(tiny(tmp_path / "run", text, PACKED, twenty))
    assert (summary["flag"], summary["group_size"]) == ("contiguous", 2)
    assert summary["unsharded_losses_bit_identical"] is True
    found = losses(tmp_path / "run")
    assert len(set(found)) == 20
    assert found[-1] < found[0] - 0.5


def test_a_context_parallel_run_that_is_killed_resumes_to_the_last_bit(text: str, tmp_path: Path) -> None:
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    four = f"{PACKED} --training.steps 4 --training.decay_steps 4 --parallel.context 2"
    summary = start(tiny(straight, text, four, "--compare-unsharded"), 4)
    assert (summary["flag"], summary["group_size"]) == ("contiguous", 2)
    assert summary["unsharded_losses_bit_identical"] is True
    interrupted = tiny(killed, text, four, "--checkpoint.save_every 2")
    with pytest.raises(RanksFailed, match="killed by SIGKILL"):
        run_ranks(run_until_killed, 4, interrupted, env={FLAG: "1"})
    assert [line["step"] for line in metrics(killed)] == [1, 2, 3]
    assert start(replace(interrupted, resume=True), 4)["first_step"] == 3
    assert losses(killed) == losses(straight)
    norms = [[line["gradient_norm"] for line in metrics(folder)] for folder in (killed, straight)]
    assert norms[0] == norms[1]


def run_until_killed(config: JobConfig) -> None:
    from mcore_dsa.train import job

    class Killed(job.Trainer):
        def train_step(self) -> Any:
            if self.step == 3 and torch.distributed.get_rank() == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().train_step()

    job.Trainer = Killed
    run(config)


@pytest.mark.parametrize(
    ("steps", "pack"), [(3, ""), (10, "--pack --training.sequence_length 128")], ids=["dense", "packed"]
)
def test_steps_of_two_context_parallel_ranks_are_those_of_one(steps: int, pack: str, text: str, tmp_path: Path) -> None:
    options = "--parallel.tensor 1 --model.hidden_dropout 0 --training.micro_batch_size 1 --training.decay_steps 10"
    config = tiny(tmp_path, text, options, f"--training.steps {steps}", pack)
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
