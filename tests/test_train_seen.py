"""What a run shows and looks at: numbers, evaluation, recorded selections, traces; and that none of it moves a bit."""

import contextlib
import gzip
import io
import json
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from harness import run_ranks
from records import random_record
from torch import nn
from train_runs import FLAG, losses, metrics, run, tiny, trainer_of, write_files

from mcore_dsa.ranges import Range
from mcore_dsa.record import SelectionRecord
from mcore_dsa.rows import PackWork
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.counts import RankCounts, model_flops
from mcore_dsa.train.loop import StepReport

WATCHED = "--evaluation.every 2 --evaluation.batches 2 --logging.selections_every 2"
LAYOUTS = {
    "tp2": (2, ""),
    "pp2_vp2_packed": (
        2,
        "--parallel.tensor 1 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --model.num_layers 4 --pack"
        " --training.micro_batch_size 1",
    ),
    "cp2_experts": (
        2,
        "--parallel.tensor 1 --parallel.context 2 --parallel.expert 2 --model.num_moe_experts 4"
        " --model.moe_router_topk 2 --model.moe_ffn_hidden_size 32 --model.moe_aux_loss_coeff 0.01",
    ),
}


class FakeRun:
    """What a run of Weights & Biases is asked for, in a file: it lives in another process than the test."""

    def __init__(self, log: Path, **asked: Any) -> None:
        self.log_file, self.id = log, asked["id"] or "fresh"
        self._say("init", {name: asked[name] for name in ("project", "name", "id", "resume")})

    def define_metric(self, name: str, step_metric: str) -> None:
        self._say("define_metric", [name, step_metric])

    def log(self, values: dict[str, float]) -> None:
        if values["step"] == 4:
            raise ConnectionError("the network went")
        self._say("log", values)

    def finish(self, exit_code: int) -> None:
        self._say("finish", exit_code)

    def _say(self, what: str, asked: Any) -> None:
        with self.log_file.open("a") as file:
            file.write(json.dumps([what, asked]) + "\n")


def run_watched(config: JobConfig, log: Path) -> dict[str, Any]:
    fake: Any = types.ModuleType("wandb")
    fake.__spec__ = types.SimpleNamespace()
    fake.init = lambda **asked: FakeRun(log, **asked)
    sys.modules["wandb"] = fake
    return run(config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_looking_changes_no_bit_of_a_training(layout: str, tmp_path: Path) -> None:
    ranks, options = LAYOUTS[layout]
    data = write_files(tmp_path / "text")
    run_ranks(run, ranks, tiny(tmp_path / "plain", options), env={FLAG: "1"})
    watched = tiny(tmp_path / "watched", options, WATCHED, f"--evaluation.data {data}")
    run_ranks(run, ranks, watched, env={FLAG: "1"})
    assert losses(tmp_path / "watched") == losses(tmp_path / "plain")
    assert_seen(tmp_path / "watched", ranks, config=watched)


def assert_seen(run_dir: Path, ranks: int, config: JobConfig) -> None:
    lines = metrics(run_dir)
    assert [("evaluation_loss" in line, "selection_agreement" in line) for line in lines] == [
        (False, False),
        (True, False),
        (False, False),
        (True, True),
    ]
    for line in lines:
        pairs = line["scored_pairs_of_ranks"]
        assert len(pairs) == ranks
        assert min(pairs) > 0
        assert line["busiest_over_mean"] == max(pairs) * ranks / sum(pairs)
        assert line["exchange_bytes"] > 0 or config.parallel.pipeline > 1
        assert 0 < line["exchange_ms"] < line["step_ms"]
        assert 0 < line["indexer_ms"] < line["step_ms"]
        assert line["model_flops_per_s"] > 0
        assert line["verified_rows"] == 0
        assert "utilisation" not in line
    assert 0 < lines[-1]["selection_agreement"] <= 1
    records = [SelectionRecord.load(path) for path in sorted((run_dir / "selections").iterdir())]
    assert [record.layers for record in records] == [config.model.num_layers] * 2


def test_traces_and_sinks_take_the_numbers_of_a_run_which_survives_them(tmp_path: Path) -> None:
    options = "--profile --logging.tensorboard true --logging.wandb small"
    run_dir = tmp_path / "watched"
    run_ranks(run_watched, 2, tiny(run_dir, options), tmp_path / "wandb", env={FLAG: "1"})
    for rank in range(2):
        events = json.loads(gzip.decompress((run_dir / f"profile/rank_{rank}.json.gz").read_bytes()))["traceEvents"]
        assert {f"mcore_dsa.{name}" for name in get_args(Range)} <= {event.get("name") for event in events}
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert_told(tmp_path / "wandb", metrics(run_dir))
    # The only step of a run, done while the earlier run is still in its folder.
    one_step = "--parallel.tensor 1 --training.steps 1 --training.warmup_steps 0 --training.decay_steps 1"
    run_ranks(run, 1, tiny(run_dir, "--profile", one_step))
    assert [path.name for path in (run_dir / "profile").iterdir()] == ["rank_0.json.gz"]
    assert len(list((tmp_path / "watched.1/profile").iterdir())) == 2


def assert_told(log: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Each step's numbers until the network went; then nothing more, and the run went on."""
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert told[0] == ["init", {"project": "small", "name": "watched", "id": None, "resume": "allow"}]
    numbers = [{name: value for name, value in line.items() if name != "scored_pairs_of_ranks"} for line in lines[:3]]
    # By its own step a run that goes back to an older checkpoint would be dropped.
    assert told[1:] == [["define_metric", ["*", "step"]], *(["log", line] for line in numbers)]


def test_a_resumed_run_goes_on_in_its_run_of_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcore_dsa.train.ending import Stopped
    from mcore_dsa.train.report import RunLog

    fake: Any = types.ModuleType("wandb")
    fake.init = lambda **options: FakeRun(tmp_path / "log", **options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = tiny(tmp_path, "--logging.wandb small")
    ends = [(0, None), (2, Stopped("step 3")), (3, ValueError()), (0, KeyboardInterrupt())]
    for done, error in ends:
        with contextlib.suppress(BaseException), RunLog(config, done=done, title=""):
            if error is not None:
                raise error
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [asked["id"] for what, asked in told if what == "init"] == [None, "fresh", "fresh", None]
    assert [status for what, status in told if what == "finish"] == [0, 0, 1, 1]


def test_without_a_terminal_progress_is_a_line_for_every_half_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mcore_dsa.train.report import RunLog

    clock, shown = [0], io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    own = RankCounts(indexer_us=1, exchange_us=1, exchange_bytes=1, scored_pairs=1, verified_rows=0)
    told: Any = {"learning_rate": 1.0, "gradient_norm": 1.0, "stop": False, "seconds": 1.0, "indexer_seconds": 0.1}
    with RunLog(tiny(tmp_path, "--logging.progress true --training.steps 1000"), done=0, title="t", write=False) as log:
        for step in range(1, 301):
            clock[0] += 1
            log(StepReport(step=step, loss=1.0, counts=(own,), flops=1, **told))
    steps = [int(found) for found in re.findall(r"^t:.* (\d+)/1000 ", shown.getvalue(), re.MULTILINE)]
    assert steps == [*range(0, 301, 30), 300]


def test_selections_of_a_resumed_run_are_compared_with_those_it_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mcore_dsa.train import probes

    kept = [random_record((12, 5), (12, 8), seed=seed) for seed in range(4)]
    recorder = types.SimpleNamespace(finish=lambda: [kept[3]])
    fake = types.SimpleNamespace(recording=lambda: contextlib.nullcontext(recorder))
    monkeypatch.setattr(probes, "ModelSelections", lambda chunks: fake)
    monkeypatch.setattr(probes.dist, "get_rank", lambda: 0)
    (tmp_path / "selections").mkdir()
    for step in (1, 2, 9):
        kept[step % 3].save(tmp_path / f"selections/step_{step:08d}.safetensors")
    probes.rewind_records(tmp_path, 3)
    assert [file.name for file in probes.records_in(tmp_path / "selections")] == [
        "step_00000001.safetensors",
        "step_00000002.safetensors",
    ]
    trainer: Any = types.SimpleNamespace(step=3, chunks=[], evaluate=lambda samples, count: 0.0)
    samples: Any = None
    layers = kept[2].agreement(kept[3])
    found = probes.Probes(tiny(tmp_path), trainer, samples, None)._record(9)
    assert found == sum(layer.share for layer in layers) / len(layers)
    assert probes.records_in(tmp_path / "selections")[-1].name == "step_00000009.safetensors"
    # One that is damaged, or of other documents, costs the comparison and nothing else.
    (tmp_path / "selections/step_00000009.safetensors").write_bytes(b"cut")
    assert probes.Probes(tiny(tmp_path), trainer, samples, None)._record(10) is None
    assert "are compared with none: " in caplog.text


def test_a_trace_that_cannot_be_kept_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mcore_dsa.train import probes

    def export(path: str) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(probes.dist, "get_rank", lambda: 1)
    nothing: Any = types.SimpleNamespace(step=0)
    for run_dir, fault in ((tmp_path, "no room"), (tmp_path / "missing", "No such file")):
        probe = probes.Probes(tiny(run_dir, "--profile"), nothing, nothing, None)
        probe._profile = types.SimpleNamespace(export_chrome_trace=export)
        probe._write_trace()
        assert fault in caplog.messages[-1]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ("--logging.wandb small", "logging.wandb is 'small'; accepted without wandb is null"),
        ("--evaluation.every 2", "evaluation.every is 2; accepted with evaluation.data None is 0"),
        ("--evaluation.data README.md", "evaluation.every is 0; accepted with evaluation.data 'README.md' is an"),
        ("--evaluation.every 2 --evaluation.data nowhere", "evaluation.data: data has 'nowhere', which does not exist"),
        (
            "--evaluation.every 2 --evaluation.data README.md --evaluation.batches 900",
            "evaluation.batches is 900, 3600 samples; accepted are at most the",
        ),
        ("--model.vocab_size 100", "model.vocab_size is 100; accepted is an integer > 1"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(options: str, fault: str, tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    with pytest.raises(ValueError, match="accepted") as refused:
        prepare(tiny(tmp_path, options), 2)
    assert fault in str(refused.value)


MODELS = {
    "gpt": "",
    "experts": "--model.num_moe_experts 4 --model.moe_router_topk 2 --model.moe_ffn_hidden_size 24"
    " --model.moe_aux_loss_coeff 0",
    "hybrid": "--model.host hybrid --model.hybrid_layer_pattern D-D-- --model.num_layers 5",
}


def test_model_flops_are_those_of_the_weights_and_of_what_is_selected(tmp_path: Path) -> None:
    configs = [tiny(tmp_path, "--parallel.tensor 1", options) for options in MODELS.values()]
    for config, (trained, frozen) in zip(configs, run_ranks(weights_of, 1, configs)[0], strict=True):
        model, lengths = config.model, (40, 7, 100)
        work = PackWork(lengths, 4, 2)
        layers = (model.hybrid_layer_pattern or "DD").count("D")
        rows = [row for length in lengths for row in range(1, length + 1)]
        attention = sum(min(row, 4 * 2 + row % 4) for row in rows) * 4 * 2 * 16
        scoring = work.scored_pairs * 8 * 8
        products = 3 * (147 * trained + layers * attention) + 147 * frozen + layers * scoring
        assert model_flops(config, lengths) == 2 * products


def weights_of(configs: Sequence[JobConfig]) -> list[tuple[int, int]]:
    """Of each run's model the matrices that every token meets: trained ones, and the indexers' frozen ones."""
    from megatron.core import parallel_state

    from mcore_dsa import patches

    patches.apply()
    parallel_state.initialize_model_parallel()
    found = []
    for config in configs:
        module = trainer_of(config)[0].chunks[0]
        sizes = {True: 0, False: 0}
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2 and "embedding" not in name and not name.endswith("compress_ape"):
                sizes[parameter.requires_grad] += active(name, parameter, config)
        found.append((sizes[True], sizes[False]))
    parallel_state.destroy_model_parallel()
    return found


def active(name: str, parameter: nn.Parameter, config: JobConfig) -> int:
    """A token goes to some of the experts."""
    if "local_experts" not in name:
        return parameter.numel()
    assert config.model.num_moe_experts is not None
    assert config.model.moe_router_topk is not None
    return parameter.numel() * config.model.moe_router_topk // config.model.num_moe_experts
