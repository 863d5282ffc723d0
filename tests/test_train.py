"""The training job: its command line, and runs of a tiny model from first step to checkpoint."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import RanksFailed, run_ranks

from mcore_dsa.train.config import JobConfig, parse_config

ROOT = Path(__file__).parents[1]
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml"))
FLAG = "SKYRL_DSA_INDEXER_TP_SHARD"

# A few hundred thousand multiplications a step; sequences are four times index_topk, so that selection drops tokens.
TINY = shlex.split("""
--model.num_layers 2 --model.hidden_size 32 --model.ffn_hidden_size 64 --model.num_attention_heads 4
--model.q_lora_rank 16 --model.kv_lora_rank 16 --model.qk_head_dim 8 --model.v_head_dim 8
--model.dsa_indexer_n_heads 8 --model.dsa_indexer_head_dim 8 --model.dsa_indexer_topk 8 --model.hidden_dropout 0.1
--training.sequence_length 32 --training.micro_batch_size 2 --training.global_batch_size 4
--training.steps 4 --training.warmup_steps 1 --training.decay_steps 4
--checkpoint.save_every 0 --logging.progress false --logging.tensorboard false --max_data_bytes 20000
""")


def tiny(run_dir: Path, *options: str) -> JobConfig:
    arguments = ["--config", str(ROOT / "configs/tiny_tp2.yaml"), *TINY, "--run_dir", str(run_dir)]
    return parse_config([*arguments, *shlex.split(" ".join(options))])


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir)]


def run(config: JobConfig) -> dict[str, Any]:
    """Train in ranks that the harness started: what each of them does."""
    from mcore_dsa import patches
    from mcore_dsa.train.job import prepare, train

    patches.apply()
    return asdict(train(prepare(config, torch.distributed.get_world_size())))


def start(config: JobConfig, ranks: int = 2, **options: Any) -> dict[str, Any]:
    """Run it on new ranks; the summary, which all of them have to agree on but for times."""
    summaries = run_ranks(run, ranks, config, **{"env": {FLAG: "1"}, **options})
    times = {"tokens_per_s", "indexer_share"}
    assert all(
        {key: value for key, value in summary.items() if key not in times}
        == {key: value for key, value in summaries[0].items() if key not in times}
        for summary in summaries
    )
    return summaries[0]


def stored(run_dir: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the latest checkpoint: weights, and of the optimizer the main weights and both moments."""
    folder = run_dir / "checkpoints" / (run_dir / "checkpoints/latest").read_text()
    return run_ranks(read_tensors, 1, str(folder))[0]


def read_tensors(folder: str) -> dict[str, torch.Tensor]:
    from megatron.core import dist_checkpointing

    loaded = dist_checkpointing.load_plain_tensors(folder)
    return {key: value for key, value in loaded.items() if isinstance(value, torch.Tensor)}


def assert_equal_runs(left: Path, right: Path) -> None:
    assert losses(left) == losses(right)
    tensors = stored(left), stored(right)
    assert tensors[0].keys() == tensors[1].keys()
    assert any("exp_avg_sq" in key for key in tensors[0])
    assert [key for key in tensors[0] if not torch.equal(tensors[0][key], tensors[1][key])] == []


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_configuration_states_a_whole_run(path: Path) -> None:
    config = parse_config(["--config", str(path)])
    written = yaml.safe_load(path.read_text())
    assert asdict(config) == written
    ranks = config.parallel.tensor * config.parallel.pipeline
    assert config.faults(ranks) == []
    assert config.faults(2 * ranks) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel.tensor", "0"], "parallel.tensor"),
        (["--training.lr", "fast"], "training.lr"),
        (["--training.dtype", "fp16"], "training.dtype"),
        (["--model.hiden_size", "64"], "model.hiden_size"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_bad_command_line_names_the_field(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--config", str(ROOT / "configs/tiny_tp2.yaml"), *arguments])
    assert message in capsys.readouterr().err


def test_a_missing_field_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = (ROOT / "configs/tiny_tp2.yaml").read_text().splitlines()
    (tmp_path / "run.yaml").write_text("\n".join(line for line in lines if "kv_lora_rank" not in line))
    with pytest.raises(SystemExit, match="2"):
        parse_config(["--config", str(tmp_path / "run.yaml")])
    assert "model.kv_lora_rank" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "ranks", "fault"),
    [
        ("", 3, "3 ranks; accepted: a multiple of parallel.tensor * parallel.pipeline = 2"),
        ("--parallel.tensor 3", 3, "model.num_attention_heads=4; accepted: a multiple of parallel.tensor = 3"),
        ("--model.ffn_hidden_size 63", 2, "model.ffn_hidden_size=63; accepted: a multiple of parallel.tensor = 2"),
        (
            "--training.sequence_length 33",
            2,
            "training.sequence_length=33; accepted: a multiple of parallel.tensor = 2",
        ),
        ("--training.global_batch_size 5", 4, "training.global_batch_size=5; accepted: a multiple of"),
        ("--parallel.pipeline 4", 8, "model.num_layers=2; accepted: a multiple of"),
        ("--parallel.virtual_pipeline 2", 2, "parallel.virtual_pipeline=2; accepted with parallel.pipeline=1: null"),
        (
            "--parallel.pipeline 2 --parallel.virtual_pipeline 1 --training.global_batch_size 2",
            4,
            "makes 1 micro batches a step; accepted with parallel.virtual_pipeline: at least parallel.pipeline = 2",
        ),
        ("--model.host hybrid", 2, "model.hybrid_layer_pattern=None; accepted with model.host=hybrid: a pattern"),
        ("--model.hybrid_layer_pattern D-", 2, "model.hybrid_layer_pattern='D-'; accepted with model.host=gpt: null"),
        ("--training.min_lr 1", 2, "training.min_lr=1.0; accepted: at most training.lr"),
        ("--training.warmup_steps 4", 2, "training.warmup_steps=4; accepted: fewer than the 4 steps"),
        ("--model.hidden_dropout 1", 2, "model.hidden_dropout=1.0; accepted: 0 to below 1"),
        ("--training.seed 2147483648", 2, "training.seed=2147483648; accepted: 0 to below 2**31"),
        ("--compare-unsharded --parallel.tensor 1", 1, "compare_unsharded=true with parallel.tensor=1; accepted: 2"),
    ],
)
def test_values_that_cannot_run_are_refused_with_what_is_accepted(
    options: str, ranks: int, fault: str, tmp_path: Path
) -> None:
    from mcore_dsa.train.job import prepare

    config = tiny(tmp_path, options)
    assert [fault in line for line in config.faults(ranks)].count(True) == 1
    # Without a process group: nothing is sent before the run is known to be possible.
    with pytest.raises(ValueError, match="accepted") as refused:
        prepare(config, ranks)
    assert fault in str(refused.value)


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    faults = tiny(tmp_path, "--training.min_lr 1 --training.warmup_steps 9 --training.sequence_length 31").faults(2)
    assert len(faults) == 3


def test_what_the_attention_refuses_is_refused_before_it_starts(tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    with pytest.raises(ValueError, match="dsa_indexer_topk is 9; accepted is a multiple of dsa_indexer_kpool"):
        prepare(tiny(tmp_path, "--model.dsa_indexer_topk 9"), 2)


def test_a_comparison_needs_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_dsa.train.job import prepare

    config = tiny(tmp_path, "--compare-unsharded")
    monkeypatch.setenv(FLAG, "off")
    with pytest.raises(ValueError, match=f"compare_unsharded=true with {FLAG} off; accepted: a partition"):
        prepare(config, 2)
    monkeypatch.setenv(FLAG, "1")
    prepare(config, 2)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds something else; accepted: a new or empty folder, or a run's"):
        prepare(tiny(tmp_path), 2)


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
    "pp2_vp2": (2, "--parallel.tensor 1 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --model.num_layers 4"),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_a_resumed_run_continues_to_the_last_bit(spread: str, tmp_path: Path) -> None:
    ranks, options = SPREADS[spread]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    whole = start(tiny(straight, options), ranks)
    first = start(tiny(resumed, options, "--training.steps 2"), ranks)
    second = start(tiny(resumed, options, "--resume"), ranks)
    assert (whole["first_step"], first["first_step"], second["first_step"]) == (1, 1, 3)
    assert first["first_loss"] == whole["first_loss"]
    assert second["last_loss"] == whole["last_loss"]
    assert len(set(losses(straight))) == 4
    assert_equal_runs(straight, resumed)


def test_a_checkpoint_cut_short_is_not_taken_for_a_complete_one(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    start(tiny(straight, "--checkpoint.save_every 1"))
    with pytest.raises(RanksFailed, match="the power went"):
        run_ranks(run_until_power_fails, 2, tiny(broken, "--checkpoint.save_every 1"), env={FLAG: "1"})
    checkpoints = broken / "checkpoints"
    assert (checkpoints / "latest").read_text() == "step_00000002"
    assert (checkpoints / "step_00000003").is_dir()
    assert [line["step"] for line in metrics(broken)] == [1, 2, 3]
    start(tiny(broken, "--checkpoint.save_every 1 --resume"))
    assert [line["step"] for line in metrics(broken)] == [1, 2, 3, 4]
    assert_equal_runs(straight, broken)


def run_until_power_fails(config: JobConfig) -> None:
    """Everything of the third checkpoint is on disk but the file that completes it."""
    from mcore_dsa.train import checkpointing

    publish = checkpointing.replace_text

    def fail_on_the_third(path: Path, text: str) -> None:
        if text == "step_00000003":
            raise RuntimeError("the power went")
        publish(path, text)

    checkpointing.replace_text = fail_on_the_third
    run(config)


def test_resuming_refuses_another_run(tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    with pytest.raises(ValueError, match=r"resume=true: .* holds no complete checkpoint; accepted: a run_dir with one"):
        prepare(tiny(tmp_path / "nothing", "--resume"), 2)
    start(tiny(tmp_path, "--training.steps 2"))
    with pytest.raises(ValueError, match="accepted when resuming") as refused:
        prepare(
            tiny(
                tmp_path, "--resume --training.lr 0.1 --model.hidden_dropout 0 --max_data_bytes 9000 --training.steps 2"
            ),
            2,
        )
    lines = str(refused.value).splitlines()
    fields = ["digest of data", "model.hidden_dropout", "training.lr", "training.steps"]
    assert [line.partition("=")[0] for line in lines] == fields
    assert f"accepted when resuming from {tmp_path}" in lines[1]
    assert lines[1].endswith(": 0.1")
    prepare(tiny(tmp_path, "--resume --training.steps 3"), 2)


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
            off = read_settings().partition.value is None
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
    assert message.count("ValueError: configuration: rank 1 has") == 2
    assert not list(tmp_path.iterdir())


def run_with_a_seed_of_its_own(config: JobConfig) -> None:
    run(replace(config, training=replace(config.training, seed=torch.distributed.get_rank())))


def test_a_gradient_that_is_not_a_number_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"found (NaN|Inf)"):
        start(tiny(tmp_path, "--training.lr 1e30 --training.clip_grad 0"))
