"""The training job: runs of a tiny model from the first step to the last checkpoint."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import RanksFailed, run_ranks
from train_runs import FLAG, ROOT, TINY, losses, metrics, refusals, run, start, tiny

from mcore_dsa.train.config import JobConfig, parse_config


def stored(folders: list[str]) -> list[dict[str, torch.Tensor]]:
    """Every tensor of some checkpoints: weights, and of the optimizer the main weights and both moments."""
    from megatron.core import dist_checkpointing

    loaded = [dist_checkpointing.load_plain_tensors(folder) for folder in folders]
    return [{key: value for key, value in of.items() if isinstance(value, torch.Tensor)} for of in loaded]


def latest(run_dir: Path) -> str:
    return str(run_dir / "checkpoints" / (run_dir / "checkpoints/latest").read_text())


def assert_equal_runs(left: Path, right: Path) -> None:
    assert losses(left) == losses(right)
    one, other = run_ranks(stored, 1, [latest(left), latest(right)])[0]
    assert one.keys() == other.keys()
    assert any("exp_avg_sq" in key for key in one)
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


def test_torchrun_trains_compares_and_ends_with_a_line_of_json(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ["-m", "mcore_dsa.train", "--config", "configs/tiny_tp2.yaml", *TINY, "--run_dir", str(run_dir)]
    options = [
        "--training.steps",
        "4",
        "--compare-unsharded",
        "--logging.progress",
        "true",
        "--logging.tensorboard",
        "true",
    ]
    environment = {
        **os.environ,
        FLAG: "1",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [*command, *job, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["steps"] == 4
    assert summary["first_step"] == 1
    assert (summary["flag"], summary["group_size"]) == ("contiguous", 2)
    assert summary["unsharded_losses_bit_identical"] is True
    assert 0 < summary["indexer_share"] < 1
    assert summary["tokens_per_s"] > 0
    assert summary["run_dir"] == str(run_dir)
    assert [line["step"] for line in metrics(run_dir)] == [1, 2, 3, 4]
    assert [losses(run_dir)[0], losses(run_dir)[-1]] == [summary["first_loss"], summary["last_loss"]]
    assert all("loss" in line and "tokens/s" in line and "indexer" in line for line in progress(done.stderr))
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert parse_config(["--config", str(run_dir / "config.yaml")]).training.steps == 4
    (begun,) = map(json.loads, (run_dir / "starts.jsonl").read_text().splitlines())
    assert (begun["first_step"], begun["steps"], begun["ranks"]) == (1, 4, 2)
    assert (begun["ran"][FLAG], begun["ran"]["torch"]) == ("contiguous", torch.__version__)


def progress(stderr: str) -> list[str]:
    """What the bar of the training showed after its first step."""
    shown = [
        line for line in stderr.replace("\r", "\n").splitlines() if line.startswith("train:") and "0/4" not in line
    ]
    assert shown, stderr
    return shown


SPREADS = {
    "tp2": (2, ""),
    "dp2": (2, "--parallel.tensor 1"),
    "tp2_dp2_bf16": (4, "--training.dtype bf16"),
    "tp2_hybrid": (2, "--model.host hybrid --model.hybrid_layer_pattern D-D- --model.num_layers 4"),
    "ep2_packed": (
        2,
        "--parallel.tensor 1 --parallel.expert 2 --model.num_moe_experts 4 --model.moe_router_topk 2"
        " --model.moe_ffn_hidden_size 32 --model.moe_aux_loss_coeff 0.01 --pack --training.micro_batch_size 1",
    ),
    "pp2_vp2": (2, "--parallel.tensor 1 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --model.num_layers 4"),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_resumed_run_continues_to_the_last_bit(spread: str, tmp_path: Path) -> None:
    ranks, options = SPREADS[spread]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = start(tiny(straight, options, "--checkpoint.save_every 2"), ranks)
    ended_after_two_steps(straight, resumed)
    second = start(tiny(resumed, options, "--checkpoint.save_every 2 --resume"), ranks)
    assert (whole["first_step"], second["first_step"]) == (1, 3)
    assert second["last_loss"] == whole["last_loss"]
    assert len(set(losses(straight))) == 4
    assert_equal_runs(straight, resumed)


def ended_after_two_steps(run_dir: Path, copy: Path) -> None:
    """What a run of four steps had left behind when its second checkpoint was whole."""
    shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("step_00000004"))
    (copy / "checkpoints/latest").write_text("step_00000002")
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[:2]))


def test_a_run_continues_beyond_the_steps_that_were_planned(tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = start(tiny(straight, "--parallel.tensor 1"), 1)
    first = start(tiny(resumed, "--parallel.tensor 1 --training.steps 2"), 1)
    second = start(tiny(resumed, "--parallel.tensor 1 --resume"), 1)
    assert (first["first_step"], second["first_step"]) == (1, 3)
    assert first["first_loss"] == whole["first_loss"]
    assert_equal_runs(straight, resumed)


def test_every_sample_is_read_once_and_a_resumed_run_goes_on_with_the_next(tmp_path: Path) -> None:
    options = "--parallel.tensor 1"
    before = run_ranks(
        run_and_record_samples, 2, tiny(tmp_path, options, "--training.steps 1 --training.warmup_steps 0")
    )
    after = run_ranks(run_and_record_samples, 2, tiny(tmp_path, options, "--resume --training.warmup_steps 0"))
    assert before == [[0, 1], [2, 3]]
    assert after == [[4, 5, 8, 9, 12, 13], [6, 7, 10, 11, 14, 15]]


def run_and_record_samples(config: JobConfig) -> list[int]:
    from mcore_dsa.train.loop import Trainer
    from mcore_dsa.train.samples import Windows

    samples = []
    read = Windows.__getitem__

    def record(self: Windows, sample: int) -> Any:
        samples.append(sample)
        return read(self, sample)

    def step(self: Trainer) -> Any:
        # Before a checkpoint the next samples are read as well.
        Windows.__getitem__ = record
        try:
            return train_step(self)
        finally:
            Windows.__getitem__ = read

    train_step = Trainer.train_step
    Trainer.train_step = step
    run(config)
    return samples


EVERY = "--training.steps 3 --checkpoint.save_every 1"


def test_a_checkpoint_cut_short_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    start(tiny(straight, EVERY))
    with pytest.raises(RanksFailed, match="the power went"):
        run_ranks(run_until_power_fails, 2, tiny(broken, EVERY), env={FLAG: "1"})
    checkpoints = broken / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step_00000001"
    assert (checkpoints / "step_00000002").is_dir()
    assert [line["step"] for line in metrics(broken)] == [1, 2]
    start(tiny(broken, f"{EVERY} --resume"))
    assert [line["step"] for line in metrics(broken)] == [1, 2, 3]
    assert_equal_runs(straight, broken)


def run_until_power_fails(config: JobConfig) -> None:
    """The second checkpoint is written but for its last file when the run ends."""
    from mcore_dsa.train import checkpointing

    write = checkpointing.dist_checkpointing.save

    def fail_in_the_second(state: Any, folder: str, writer: Any) -> None:
        write(state, folder, writer)
        if folder.endswith("step_00000002"):
            (Path(folder) / "metadata.json").unlink(missing_ok=True)
            raise RuntimeError("the power went")

    checkpointing.dist_checkpointing.save = fail_in_the_second
    run(config)


def test_resuming_refuses_another_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start(tiny(run_dir, "--training.steps 2"))
    other = "--training.lr 0.1 --model.hidden_dropout 0 --max_data_bytes 9000 --training.steps 2"
    configs = [
        tiny(tmp_path / "nothing", "--resume"),
        tiny(run_dir, "--resume", other),
        tiny(run_dir, "--resume --pack --training.micro_batch_size 1"),
    ]
    nothing, fields, pack = run_ranks(refusals, 2, configs)[0]
    folder = tmp_path / "nothing" / "checkpoints"
    assert nothing == f"resume is true; accepted is false: {folder} holds no complete checkpoint"
    lines = fields.splitlines()
    assert [line.partition(" is ")[0] for line in lines] == [
        "digest of data",
        "model.hidden_dropout",
        "training.lr",
        "training.steps",
    ]
    assert f"accepted to resume {run_dir}" in lines[1]
    assert lines[1].endswith(" is 0.1")
    lines = [line.partition(" is ")[0] for line in pack.splitlines()]
    assert lines == ["document_multiple", "pack"]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_resuming_refuses_other_expert_parallel_ranks(tmp_path: Path) -> None:
    from mcore_dsa.train.checkpointing import resume_faults, run_fields
    from mcore_dsa.train.stored import Checkpoint

    config = tiny(tmp_path)
    saved = Checkpoint(folder=tmp_path, step=1, run=run_fields(config, ""), layout={"expert": 1})
    assert resume_faults(saved, config, "") == []
    free = "--training.micro_batch_size 1 --training.recompute full"
    assert resume_faults(saved, tiny(tmp_path, free), "") == []
    (fault,) = resume_faults(saved, tiny(tmp_path, "--training.steps 9 --training.decay_steps null"), "")
    assert fault == f"training.decay_steps is 9; accepted to resume {tmp_path} is 4: null is training.steps"
    (fault,) = resume_faults(replace(saved, layout={"expert": 2}), config, "")
    assert fault.startswith(f"parallel.expert is 1; accepted to resume {tmp_path} is 2: ")


def test_a_hybrid_run_may_go_on_under_another_cut_of_its_pipeline(tmp_path: Path) -> None:
    from mcore_dsa.train.checkpointing import resume_faults, run_fields
    from mcore_dsa.train.stored import Checkpoint

    hybrid = "--model.host hybrid --model.num_layers 4 --model.hybrid_layer_pattern"
    saved = Checkpoint(
        folder=tmp_path, step=1, run=run_fields(tiny(tmp_path, hybrid, "D-D-"), ""), layout={"expert": 1}
    )
    assert resume_faults(saved, tiny(tmp_path, hybrid, "'D-|D-'", "--parallel.pipeline 2"), "") == []
    (fault,) = resume_faults(saved, tiny(tmp_path, hybrid, "DD--"), "")
    assert fault.startswith("model.hybrid_layer_pattern is 'DD--'; accepted to resume ")


def test_what_a_resumed_run_has_otherwise_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_dsa.train.checkpointing import resume_changes, run_fields
    from mcore_dsa.train.ran import what_runs
    from mcore_dsa.train.stored import Checkpoint

    config = tiny(tmp_path)
    run, ran = run_fields(config, ""), what_runs(config)
    assert {"torch", "megatron-core", "triton", "python", "device", "kernels", FLAG} <= ran.keys()
    saved = Checkpoint(folder=tmp_path, step=1, run=run, layout={}, ran=ran)
    assert resume_changes(saved, config) == ""
    # Of a checkpoint that does not say.
    assert resume_changes(replace(saved, ran={}), config) == ""
    bits = ": losses may not be those of an uninterrupted run to the last bit"
    assert (
        resume_changes(replace(saved, ran=ran | {"torch": "1"}), config) == f"torch is {torch.__version__}, was 1{bits}"
    )
    recomputing = tiny(tmp_path, "--training.recompute full")
    assert resume_changes(saved, recomputing) == f"training.recompute is full, was none{bits}"
    # What is promised to change no bit is said, and no more.
    monkeypatch.setenv(FLAG, "zigzag")
    assert resume_changes(saved, config) == f"{FLAG} is zigzag, was {ran[FLAG]}"


def test_a_run_continues_under_another_spread_but_not_to_the_last_bit(tmp_path: Path) -> None:
    straight, moved = tmp_path / "straight", tmp_path / "moved"
    options = "--model.hidden_dropout 0"
    start(tiny(straight, options))
    start(tiny(moved, options, "--training.steps 2"))
    start(tiny(moved, options, "--resume --parallel.tensor 1"), 1)
    # Sums in another order: a few units in the last place of fp32 in a loss of about 5, grown over two updates.
    assert losses(moved) == pytest.approx(losses(straight), rel=1e-5)


def test_losses_are_means_over_the_global_batch_however_it_is_spread(tmp_path: Path) -> None:
    options = "--training.steps 2 --model.hidden_dropout 0 --parallel.tensor 1"
    start(tiny(tmp_path / "one", options), 1)
    start(tiny(tmp_path / "two", options, "--training.micro_batch_size 1"), 2)
    start(tiny(tmp_path / "big", options, "--training.micro_batch_size 4"), 1)
    # As above, grown over one update.
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)
    assert losses(tmp_path / "big") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


def test_a_fresh_run_sets_an_earlier_one_aside(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    options = "--training.steps 1 --training.warmup_steps 0 --parallel.tensor 1"
    for seed in (1, 2, 3):
        start(tiny(run_dir, options, f"--training.seed {seed}"), 1)
    folders = [tmp_path / "run.1", tmp_path / "run.2", run_dir]
    assert [parse_config(["--config", str(folder / "config.yaml")]).training.seed for folder in folders] == [1, 2, 3]
    assert all(len(losses(folder)) == 1 for folder in folders)


def test_a_comparison_that_fails_is_reported(tmp_path: Path) -> None:
    summary = run_ranks(run_with_a_fault_when_unsharded, 2, tiny(tmp_path, "--compare-unsharded"), env={FLAG: "1"})[0]
    assert summary["unsharded_losses_bit_identical"] is False


def run_with_a_fault_when_unsharded(config: JobConfig) -> dict[str, Any]:
    """The last bit of one weight differs with the flag off."""
    from mcore_dsa.settings import read_settings
    from mcore_dsa.train import job

    class Faulty(job.Trainer):
        def train_step(self) -> Any:
            report = super().train_step()
            off = read_settings().partition.value == "off"
            if off and report.step == 4:
                one_bit = torch.tensor(report.loss).view(torch.int32) + 1
                report = replace(report, loss=float(one_bit.view(torch.float32)))
            return report

    job.Trainer = Faulty
    return run(config)


def test_ranks_that_were_told_different_things_say_so_on_every_rank(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(run_with_a_seed_of_its_own, 2, tiny(tmp_path))
    message = str(failed.value)
    assert message.count("ValueError: training.seed is 1 on rank 1; accepted is rank 0's, 0\n") == 2
    assert not list(tmp_path.iterdir())


def run_with_a_seed_of_its_own(config: JobConfig) -> None:
    run(replace(config, training=replace(config.training, seed=torch.distributed.get_rank())))


def test_a_gradient_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"found (NaN|Inf)"):
        start(tiny(tmp_path, "--training.lr 1e30 --training.clip_grad 0"))
