"""The training job's command line, and the runs that are refused before they start."""

import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from train_runs import FLAG, ROOT, tiny

from mcore_dsa.train.config import parse_config
from mcore_dsa.train.faults import faults_of

HYBRID = "--model.host hybrid --model.num_layers 4 --model.hybrid_layer_pattern"
MOE = "--model.num_moe_experts 4 --model.moe_router_topk 2 --model.moe_ffn_hidden_size 32 --model.moe_aux_loss_coeff 0"
PACK = "--pack --training.micro_batch_size 1"
RUNS = sorted(path for path in (ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_configuration_states_a_whole_run(path: Path) -> None:
    config = parse_config(["--config", str(path)])
    written = yaml.safe_load(path.read_text())
    assert asdict(config) == written
    assert faults_of(config, config.model_ranks) == []
    assert faults_of(config, 2 * config.model_ranks) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parallel.tensor", "0"], "parallel.tensor"),
        (["--resume", "perhaps"], "resume"),
        (["--resume-from", "0"], "resume_from"),
        (["--checkpoint.keep", "0"], "checkpoint.keep"),
        (["--training.lr", "fast"], "training.lr"),
        (["--training.dtype", "fp16"], "training.dtype"),
        (["--model.hiden_size", "64"], "model.hiden_size"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        # A name that is cut short is none.
        (["--training.step", "5"], "unrecognized arguments: --training.step"),
        (["--run", "x"], "unrecognized arguments: --run"),
    ],
)
def test_a_bad_command_line_names_the_field_in_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        parse_config(["--config", str(ROOT / "configs/tiny_tp2.yaml"), *arguments])
    assert "\n" not in str(refused.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    lines = (ROOT / "configs/tiny_tp2.yaml").read_text().splitlines()
    (tmp_path / "run.yaml").write_text("\n".join(line for line in lines if "kv_lora_rank" not in line))
    with pytest.raises(ValueError, match=r"model\.kv_lora_rank"):
        parse_config(["--config", str(tmp_path / "run.yaml")])


LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join(10 * [f'*a{n - 1}'])}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"run_dir: caf\xe9", "a file in UTF-8, which byte 0xe9 at 12 is not"),
        (b"data: &a [*a]", "line 1 has the alias *a; accepted is YAML that writes out every value"),
        (LAUGHS.encode(), "line 2 has the alias *a0; accepted is"),
        (b"data: " + b"[" * 20_000, "exceeded maximum nesting depth"),
        (b"data: [" + b"x," * 200_000 + b"]", "of 400008 bytes; accepted are at most 262144"),
        (b"training: {steps: " + b"9" * 5000 + b"}", "Exceeds the limit (4300 digits)"),
        (b"&a {model: *a}", "the alias *a"),
        (b"\0", "control characters are not allowed"),
        (b"[1, 2]", "config is a list; accepted are fields and their values"),
        (b"", "config is nothing; accepted are fields and their values"),
        (b"pack: true\nresume: no\npack: false", "line 3 has the field pack once more; accepted is one value of each"),
        (b"training.steps: 5\ntraining: {steps: 3}", "line 2 has the field training.steps once more"),
    ],
)
def test_a_hostile_file_is_refused_in_a_line_that_names_it(text: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=re.escape(str(path))) as refused:
        parse_config(["--config", str(path)])
    assert fault in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) <= 500


def flat(fields: dict[str, Any]) -> dict[str, Any]:
    nested = {
        f"{name}.{inner}": value[inner] for name, value in fields.items() if isinstance(value, dict) for inner in value
    }
    return {name: value for name, value in fields.items() if not isinstance(value, dict)} | nested


@pytest.mark.parametrize("hyphen", [False, True])
@pytest.mark.parametrize(("words", "said"), [([], True), (["true"], True), (["no"], False)])
def test_every_field_is_an_option_in_either_spelling(hyphen: bool, words: list[str], said: bool) -> None:
    fields = flat(yaml.safe_load((ROOT / "configs/tiny_tp2.yaml").read_text())) | {"data": ["a", "b"]}
    options = []
    for name, value in fields.items():
        options.append(f"--{name.replace('_', '-') if hyphen else name}")
        if isinstance(value, bool):
            options += words
            fields[name] = said
        else:
            options += value if isinstance(value, list) else ["null" if value is None else str(value)]
    assert flat(asdict(parse_config(options))) == fields


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("checkpoint: {keep: 0}", "checkpoint.keep is 0; accepted is an integer >= 1 or null"),
        ("training: {lr: fast}", "training.lr is 'fast'; accepted is a number > 0"),
        ("training: {dtype: fp16}", "training.dtype is fp16; accepted is fp32 or bf16"),
        ("pack: perhaps", "pack is perhaps; accepted is true or false"),
        ("resume: perhaps", "resume is perhaps; accepted is true or false or auto"),
        ("run_dir: 5", "run_dir is 5; accepted is text"),
        ("data: x", "data is x; accepted is a list of texts"),
    ],
)
def test_a_value_of_another_kind_is_refused_in_one_sentence(text: str, fault: str, tmp_path: Path) -> None:
    whole = ROOT / "configs/tiny_tp2.yaml"
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ValueError, match="accepted") as refused:
        parse_config(["--config", str(whole), "--config", str(tmp_path / "run.yaml")])
    assert str(refused.value) == f"{tmp_path / 'run.yaml'}: {fault}"


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("nowhere")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(ValueError, match=f"config is '{path}'; accepted is a regular file"):
            parse_config(["--config", str(path)])
    with pytest.raises(ValueError, match="accepted is a file that can be read: No such file"):
        parse_config(["--config", str(tmp_path / "link")])
    with pytest.raises(ValueError, match=r"line 1 has the alias \*a"):
        parse_config(["--config", "{data: &a [*a]}"])


def test_a_run_shorter_than_its_warm_up_ends_in_it(tmp_path: Path) -> None:
    whole = ["--config", str(ROOT / "configs/tiny_tp2.yaml"), "--run_dir", str(tmp_path)]
    short = parse_config([*whole, "--training.steps", "4"])
    assert (short.training.warmup_steps, short.training.lr_decay_steps) == (10, 11)
    assert faults_of(short, 2) == []
    assert parse_config(whole).training.lr_decay_steps == 100


@pytest.mark.parametrize(
    ("options", "ranks", "fault"),
    [
        (
            "",
            3,
            "the number of ranks is 3; accepted is a multiple of parallel.tensor * parallel.pipeline * "
            "parallel.context, 2",
        ),
        ("--parallel.tensor 3", 3, "model.num_attention_heads is 4; accepted is a multiple of parallel.tensor, 3"),
        ("--model.ffn_hidden_size 63", 2, "model.ffn_hidden_size is 63; accepted is a multiple of parallel.tensor, 2"),
        (
            "--training.sequence_length 33",
            2,
            "training.sequence_length is 33; accepted is a multiple of parallel.tensor, 2",
        ),
        ("--training.global_batch_size 5", 4, "training.global_batch_size is 5; accepted is a multiple of"),
        ("--parallel.pipeline 4", 8, "model.num_layers is 2; accepted is a multiple of"),
        (
            "--parallel.virtual_pipeline 2",
            2,
            "parallel.virtual_pipeline is 2; accepted with parallel.pipeline 1 is null",
        ),
        (
            "--parallel.pipeline 2 --parallel.virtual_pipeline 1",
            4,
            "parallel.virtual_pipeline is 1; accepted is null, or an integer >= 2",
        ),
        (
            "--model.num_layers 4 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --training.global_batch_size 2",
            4,
            "training.global_batch_size is 2, 1 micro batches a step; accepted with parallel.virtual_pipeline is a",
        ),
        (
            "--model.num_layers 4 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --training.global_batch_size 6",
            4,
            "training.global_batch_size is 6, 3 micro batches a step; accepted with parallel.virtual_pipeline is a",
        ),
        ("--model.host hybrid", 2, "model.hybrid_layer_pattern is None; accepted with model.host hybrid is a pattern"),
        (
            "--model.hybrid_layer_pattern D-",
            2,
            "model.hybrid_layer_pattern is 'D-'; accepted with model.host gpt is null",
        ),
        (f"{HYBRID}='D-D' --model.num_layers 4", 2, "is 'D-D'; accepted is one of model.num_layers letters, 4"),
        (f"{HYBRID}='D*D-'", 2, "is 'D*D-'; accepted are the letters 'D', at least once, '-' and 'E'"),
        (f"{HYBRID}='----'", 2, "is '----'; accepted are the letters 'D', at least once, '-' and 'E'"),
        (f"{HYBRID}='D-|D-'", 2, "accepted is one of parallel.pipeline * parallel.virtual_pipeline parts, 1"),
        (
            f"{HYBRID}='D-D-' --parallel.pipeline 2",
            4,
            "accepted is one of parallel.pipeline * parallel.virtual_pipeline",
        ),
        (
            f"{HYBRID}='D|-|D|-' --parallel.pipeline 2",
            4,
            "accepted is one of parallel.pipeline * parallel.virtual_pipeline",
        ),
        ("--parallel.context 2", 2, "the number of ranks is 2; accepted is a multiple of"),
        (
            "--parallel.context 2 --parallel.tensor 3 --model.num_attention_heads 6 --model.ffn_hidden_size 66",
            6,
            "training.sequence_length is 32; accepted is a multiple of 2 * parallel.context and of parallel.tensor * "
            "parallel.context, 12",
        ),
        ("--training.lr=inf", 2, "training.lr is inf; accepted is a finite number"),
        ("--model.init_method_std=inf", 2, "model.init_method_std is inf; accepted is a finite number"),
        ("--resume auto --resume-from 2", 2, "resume_from is 2; accepted with resume auto is null"),
        ("--load_hf x --resume-from 2", 2, "load_hf is 'x'; accepted with resume true is null"),
        ("--pack", 2, "training.micro_batch_size is 2; accepted with pack true is 1"),
        (f"{PACK} --document_multiple 6", 2, "training.sequence_length is 32; accepted with pack true is a multiple"),
        (
            f"{PACK} --document_multiple 2 --parallel.context 2",
            4,
            "document_multiple is 2; accepted is a multiple of 2 * parallel.context, 4",
        ),
        ("--parallel.expert 2", 4, "parallel.expert is 2; accepted with model.num_moe_experts null is 1"),
        (
            "--model.moe_router_topk 2",
            2,
            "model.moe_router_topk is 2; accepted with model.num_moe_experts null",
        ),
        ("--model.num_moe_experts 4 --model.moe_router_topk 2 --model.moe_aux_loss_coeff 0", 2, "moe_ffn_hidden_size"),
        (f"{MOE} --model.moe_router_topk 5", 2, "model.moe_router_topk is 5; accepted is at most"),
        (f"{MOE} --model.moe_ffn_hidden_size 3", 2, "model.moe_ffn_hidden_size is 3; accepted is a multiple of"),
        (
            f"{MOE} --parallel.expert 2",
            2,
            "parallel.expert is 2; accepted is a divisor of model.num_moe_experts, 4",
        ),
        (
            f"{MOE} --parallel.expert 3",
            6,
            "parallel.expert is 3; accepted is a divisor of model.num_moe_experts, 4",
        ),
        (f"{HYBRID}='D-DE'", 2, "'D-DE'; accepted with model.num_moe_experts null is one without 'E'"),
        (f"{MOE} {HYBRID}='D-D-'", 2, "'D-D-'; accepted with model.num_moe_experts given is one with 'E'"),
        ("--training.min_lr 1", 2, "training.min_lr is 1.0; accepted is at most training.lr"),
        ("--training.warmup_steps 4", 2, "training.warmup_steps is 4; accepted is less than training.decay_steps, 4"),
        ("--training.steps 100000000", 2, "training.steps is 100000000; accepted is an integer < 100000000"),
        ("--training.lr inf", 2, "training.lr is inf; accepted is a finite number"),
        ("--model.moe_aux_loss_coeff inf", 2, "model.moe_aux_loss_coeff is inf; accepted is a finite number"),
        ("--model.num_layers 1000000000000", 2, "model.num_layers is 1000000000000; accepted is an integer <"),
        ("--data ''", 2, "data has ''; accepted are names of files and folders"),
        ("--run_dir ' '", 2, "run_dir has ' '; accepted are names of files and folders"),
        ("--run_dir '~/run'", 2, "run_dir has '~/run'; accepted are names of files and folders, written out where"),
        ("--waiting.end_after_s 1", 2, "waiting.end_after_s is 1.0; accepted is at least waiting.say_after_s, 30.0"),
        ("--model.hidden_dropout 1", 2, "model.hidden_dropout is 1.0; accepted is a number in [0, 1)"),
        ("--training.seed 2147483648", 2, "training.seed is 2147483648; accepted is an integer < 2147483648"),
        (
            "--compare-unsharded --parallel.tensor 1",
            1,
            "compare_unsharded is true; accepted with parallel.tensor 1 is false",
        ),
    ],
)
def test_values_that_cannot_run_are_refused_with_what_is_accepted(
    options: str, ranks: int, fault: str, tmp_path: Path
) -> None:
    from mcore_dsa.train.job import prepare

    config = tiny(tmp_path, options)
    assert [fault in line for line in faults_of(config, ranks)].count(True) == 1
    # Without a process group: nothing is sent before the run is known to be possible.
    with pytest.raises(ValueError, match="accepted") as refused:
        prepare(config, ranks)
    assert fault in str(refused.value)


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    config = tiny(tmp_path, "--training.min_lr 1 --training.warmup_steps 9 --training.sequence_length 31")
    assert len(faults_of(config, 2)) == 3


def test_what_the_attention_refuses_is_refused_before_it_starts(tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    with pytest.raises(ValueError, match="dsa_indexer_topk is 9; accepted is a multiple of dsa_indexer_kpool"):
        prepare(tiny(tmp_path, "--model.dsa_indexer_topk 9"), 2)


def test_a_comparison_needs_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mcore_dsa.train.job import prepare

    config = tiny(tmp_path, "--compare-unsharded")
    monkeypatch.setenv(FLAG, "off")
    with pytest.raises(ValueError, match=f"compare_unsharded is true; accepted with {FLAG} off is false"):
        prepare(config, 2)
    monkeypatch.setenv(FLAG, "zig-zag")
    monkeypatch.setenv("MCORE_DSA_VERIFY", "perhaps")
    with pytest.raises(
        ValueError, match=f"^{FLAG} is 'zig-zag'; accepted are .*\n.*MCORE_DSA_VERIFY is 'perhaps'; [^\n]*$"
    ):
        prepare(config, 2)
    monkeypatch.delenv("MCORE_DSA_VERIFY")
    monkeypatch.setenv(FLAG, "1")
    prepare(config, 2)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds something else; accepted is a new or empty folder, or a run's"):
        prepare(tiny(tmp_path), 2)
