"""The command line: what it plans, how it refuses, what it needs."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import command, tiny_checkpoint
from hf_checkpoints import full, tiny_config
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from mcore_dsa import DsaGeometry
from mcore_dsa.cli import main
from mcore_dsa.cli.context import busiest_group
from mcore_dsa.tp_plan import DsaTpPlan
from mcore_dsa.work import best_partition, selection_work

ROOT = Path(__file__).parents[1]
FLASH = str(ROOT / "configs" / "glm-5.3-flash.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


def plan(*words: object) -> dict[str, Any]:
    status, out, err = command("plan", "--json", *words)
    assert (status, err, out.count("\n")) == (0, "", 1), err
    return json.loads(out)


# What a rank holds of a layer of GLM-5.3-Flash: 31,725,056 bytes replicated, and its part of 218,103,808.
@pytest.mark.parametrize(
    ("tp", "local"), [(1, 249_828_864), (2, 140_776_960), (4, 86_251_008), (8, 58_988_032), (64, 35_132_928)]
)
def test_bytes_of_glm_5_3_flash(tp: int, local: int) -> None:
    report = plan("--config", FLASH, "--tp", tp, "--seq", 8192)
    layer = {"local": local, "full": 249_828_864, "replicated": 31_725_056, "ape_in_fp32": 1024}
    assert report["bytes"] == {
        "layer": {"layers": 1, **layer},
        "dsa_layers": {"layers": 11, **{name: 11 * size for name, size in layer.items()}},
        "mtp_blocks": {"layers": 1, **layer},
    }
    assert report["bytes"]["dsa_layers"]["full"] == 2_748_117_504
    assert report["needs_output_all_reduce"] is (tp > 1)
    plans = [DsaTpPlan(rank, tp, DsaGeometry.from_config(FLASH)) for rank in range(tp)]
    assert len(report["tensors"]) == 14
    for position, told in enumerate(report["tensors"]):
        tensors = [each.tensors[position] for each in plans]
        assert (told["name"], told["local_bytes"]) == (tensors[0].name, tensors[0].local_bytes)
        assert tuple(told["local_shape"]) == tensors[0].local_shape
        assert told["src_row_offsets"] == [tensor.src_row_offset for tensor in tensors]
        assert told["src_col_offsets"] == [tensor.src_col_offset for tensor in tensors]
    status, out, _ = command("plan", "--config", FLASH, "--tp", tp, "--seq", 8192)
    assert status == 0
    for name, number in (("a layer", 1), ("all DSA layers", 11)):
        (line,) = (line for line in out.splitlines() if line.startswith(name))
        assert f"{number * local:,}" in line.split()


@pytest.mark.parametrize("lengths", [[65536], [60_000, *[64] * 80, 416]])
def test_work_is_the_work_model_s(tmp_path: Path, lengths: list[int]) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text(" ".join(map(str, lengths[:3])) + "\n" + "\n".join(map(str, lengths[3:])))
    selection = plan("--config", FLASH, "--tp", 8, "--seq", 65536, "--segments", file)["selection"]
    geometry = DsaGeometry.from_config(FLASH)
    works = {
        kind or "off": selection_work(lengths, geometry, group_size=8, partition=kind)
        for kind in (None, "contiguous", "zigzag", "balanced")
    }
    assert selection["partitions"].keys() == works.keys()
    unsharded = works["off"].ranks[0].flops
    for name, work in works.items():
        told = selection["partitions"][name]
        assert told["ranks"] == [vars(rank) for rank in work.ranks]
        # Shares are quotients of float64, which may be taken in another order: a few of its roundings.
        assert told["busiest_over_mean"] == pytest.approx(work.busiest_over_mean, rel=1e-12)
        assert told["busiest_flops"] == max(rank.flops for rank in work.ranks)
        assert told["saved_flops"] == unsharded - told["busiest_flops"]
        assert told["saved_share"] == pytest.approx(1 - told["busiest_flops"] / unsharded, rel=1e-12)
    best = best_partition(lengths, geometry, group_size=8)
    assert selection["best"] == selection["partition"] == best


def test_the_listed_partition_can_be_chosen() -> None:
    words = ("plan", "--config", FLASH, "--tp", "4", "--seq", "32768", "--partition", "contiguous")
    _, out, _ = command(*words)
    assert json.loads(command(*words, "--json")[1])["selection"]["partition"] == "contiguous"
    assert "The same on each rank, contiguous" in out
    (best,) = (line for line in out.splitlines() if "(best)" in line)
    assert best.startswith("zigzag (best)")


def test_one_rank_saves_nothing() -> None:
    selection = plan("--config", FLASH, "--tp", 1, "--seq", 32768)["selection"]
    assert {entry["saved_flops"] for entry in selection["partitions"].values()} == {0}
    assert {entry["busiest_over_mean"] for entry in selection["partitions"].values()} == {1.0}


def test_a_pack_that_is_never_scored_divides_by_nothing() -> None:
    entry = plan("--config", FLASH, "--tp", 2, "--seq", 64)["selection"]["partitions"]["zigzag"]
    assert (entry["busiest_flops"], entry["saved_share"], entry["busiest_over_mean"]) == (0, 0.0, 1.0)


def counted(geometry: DsaGeometry, lengths: list[int], rows: list[tuple[int, int]]) -> tuple[int, int]:
    """Visible and scored pairs of (document, token) rows, one by one."""
    pools = [(token + 1) // geometry.index_kpool for _, token in rows]
    return sum(pools), sum(count for count in pools if count > geometry.pool_budget)


@given(halves=st.lists(st.integers(1, 60), min_size=1, max_size=5), cp=st.integers(1, 4), tp=st.integers(1, 5))
@hypothesis_settings(max_examples=60)
def test_context_parallel_groups_count_as_row_by_row(halves: list[int], cp: int, tp: int) -> None:
    geometry = DsaGeometry.from_config(tiny_config(index_topk=12))
    lengths = [2 * cp * half for half in halves]
    groups = []
    for rank in range(cp):
        rows = []
        for document, half in enumerate(halves):
            for chunk in (rank, 2 * cp - 1 - rank):
                rows += [(document, chunk * half + token) for token in range(half)]
        groups.append(rows)
    busiest = max(groups, key=lambda rows: counted(geometry, lengths, rows)[1])
    told = busiest_group(lengths, geometry, tp=tp, cp=cp)
    assert told[None] == [(len(busiest), *counted(geometry, lengths, busiest))] * tp
    for kind, parts in (("contiguous", tp), ("zigzag", 2 * tp)):
        size = -(-len(busiest) // parts)
        slices = [busiest[part * size : (part + 1) * size] for part in range(parts)]
        shards = slices if kind == "contiguous" else [slices[rank] + slices[-1 - rank] for rank in range(tp)]
        assert told[kind] == [(len(shard), *counted(geometry, lengths, shard)) for shard in shards]
    if cp == 1:
        for kind, ranks in told.items():
            work = selection_work(lengths, geometry, group_size=tp, partition=kind)
            assert ranks == [(rank.rows, rank.visible_pairs, rank.scored_pairs) for rank in work.ranks]


def test_context_parallelism_says_what_it_does_not_model() -> None:
    selection = plan("--config", FLASH, "--tp", 4, "--cp", 4, "--seq", 65536)["selection"]
    assert selection["partitions"].keys() == {"off", "contiguous", "zigzag"}
    assert (selection["best"], selection["partition"]) == (None, "contiguous")
    for entry in selection["partitions"].values():
        for rank in entry["ranks"]:
            assert rank["received_bytes"] is rank["peak_bytes"] is None
            assert rank["flops"] == 2 * 32 * 128 * rank["scored_pairs"]
    assert sum(rank["rows"] for rank in selection["partitions"]["zigzag"]["ranks"]) == 65536 // 4
    _, out, _ = command("plan", "--config", FLASH, "--tp", 4, "--cp", 4, "--seq", 65536)
    assert out.splitlines()[-1].split()[-2:] == ["-", "-"]


def test_the_picture_shows_each_rank_under_each_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    figures: list[Figure] = []
    save = Figure.savefig

    def spy(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", spy)
    file = tmp_path / "work.png"
    report = plan("--config", FLASH, "--tp", 4, "--seq", 65536, "--plot", file)
    assert report["plot"] == str(file)
    assert file.read_bytes()[:4] == b"\x89PNG"
    drawn = {
        container.get_label().partition(":")[0]: [bar.get_height() for bar in container]
        for container in figures[0].axes[0].containers
    }
    partitions = report["selection"]["partitions"]
    wanted = {name: [rank["flops"] for rank in partitions[name]["ranks"]] for name in partitions if name != "off"}
    assert drawn == wanted


def test_answers_fit_the_width(checkpoint: Path, tmp_path: Path) -> None:
    file = checkpoint / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    long_name = full("indexer.index_kpool_compress_gate.weight_scale_inv", layer=3)
    path = checkpoint / "model-00002-of-00003.safetensors"
    save_file({**load_file(path), long_name: torch.zeros(2, 2)}, path)
    target = tmp_path / "target"
    for words in (
        ("plan", "--config", FLASH, "--tp", 64, "--seq", 1 << 20),
        ("verify", checkpoint),
        ("convert", "hf2mcore", checkpoint, target, "--tp", 2),
    ):
        _, out, _ = command(*words)
        assert out.count("\n") > 5
        assert max(len(line) for line in out.splitlines()) <= 120
    assert long_name in out


def test_a_million_tokens_on_64_ranks_are_planned_in_under_two_seconds() -> None:
    """Process time from after `import torch` on, all other imports included; and nothing big is imported."""
    program = f"""
import sys, time, torch
start = time.process_time()
from mcore_dsa.cli import main
assert main(["plan", "--config", {FLASH!r}, "--tp", "64", "--seq", "1048576"]) == 0
print(time.process_time() - start)
print(sorted({{"megatron", "transformers", "matplotlib", "safetensors"}} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *_, rank, seconds, imported = done.stdout.splitlines()
    assert rank.startswith("  63  16,384")
    assert float(seconds) < 2.0
    assert imported == "[]"


def test_the_installed_command_ends_quietly_when_its_reader_does() -> None:
    command = Path(sys.executable).with_name("mcore-dsa")
    words = [command, "plan", "--config", FLASH, "--tp", "64", "--seq", "65536"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


REFUSED = {
    "no such configuration": (["plan", "--config", "nowhere.json", "--tp", 2, "--seq", 8], "nowhere.json"),
    "heads do not divide": (["plan", "--config", FLASH, "--tp", 7, "--seq", 8], "num_attention_heads=64, got 7"),
    "no JSON": (["plan", "--config", "{tmp}/words.txt", "--tp", 2, "--seq", 8], "does not hold JSON"),
    "no geometry": (["plan", "--config", "{tmp}/empty.json", "--tp", 2, "--seq", 8], "hidden_size is missing"),
    "other sum": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 8, "--segments", "{tmp}/lengths.txt"],
        "--segments must add up to --seq 8, got 7",
    ),
    "no lengths": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 8, "--segments", "{tmp}/words.txt"],
        "positive integers, got 'many'",
    ),
    "no length": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 8, "--segments", "{tmp}/nothing.txt"],
        "positive integers, got none",
    ),
    "empty document": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 7, "--segments", "{tmp}/zero.txt"],
        "positive integers, got '0'",
    ),
    "no file of lengths": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 8, "--segments", "{tmp}/absent"],
        "absent",
    ),
    "too many pools": (["plan", "--config", FLASH, "--tp", 2, "--seq", 10**19], "fewer than 2147483648 pools"),
    "chunks of another size": (
        ["plan", "--config", FLASH, "--tp", 2, "--cp", 3, "--seq", 32],
        "a document must have a multiple of 6 tokens, got 32",
    ),
    "balanced over contexts": (
        ["plan", "--config", FLASH, "--tp", 2, "--cp", 2, "--seq", 32, "--partition", "balanced"],
        "--partition with --cp 2 must be contiguous or zigzag, got balanced",
    ),
    "no folder for a picture": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 32, "--plot", "{tmp}/absent/work.png"],
        "absent/work.png",
    ),
    "no format for a picture": (
        ["plan", "--config", FLASH, "--tp", 2, "--seq", 32, "--plot", "{tmp}/work.words"],
        "'words' is not supported",
    ),
    "nothing to verify": (["verify", "{tmp}/absent"], "absent"),
    "a folder without a checkpoint": (["verify", "{tmp}"], "must hold a .safetensors file"),
    "a target that is taken": (
        ["convert", "hf2mcore", "{tmp}/checkpoint", "{tmp}", "--tp", 2],
        "target must not exist",
    ),
    "layers of other kinds": (
        ["convert", "hf2mcore", "{tmp}/checkpoint", "{tmp}/t", "--tp", 2, "--layers", "0-0"],
        "--layers must be FIRST-LAST around some of the layers (1, 3, 4), got '0-0'",
    ),
    "layers that are none": (
        ["convert", "hf2mcore", "{tmp}/checkpoint", "{tmp}/t", "--tp", 2, "--layers", "all"],
        "--layers must be FIRST-LAST",
    ),
    "heads of a checkpoint": (
        ["convert", "hf2mcore", "{tmp}/checkpoint", "{tmp}/t", "--tp", 3],
        "num_attention_heads=4, got 3",
    ),
    "no ranks": (["convert", "mcore2hf", "{tmp}/absent", "{tmp}/t"], "source must be a folder with a .safetensors"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_answered_is_refused_in_one_line(
    case: str, as_json: bool, checkpoint: Path, tmp_path: Path
) -> None:
    for name, text in {"words": "many of them", "nothing": "\n", "lengths": "3 4", "zero": "7 0"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "empty.json").write_text("{}")
    before = sorted(path.name for path in tmp_path.iterdir())
    words, message = REFUSED[case]
    status, out, err = command(*(str(word).replace("{tmp}", str(tmp_path)) for word in words), *["--json"] * as_json)
    assert (status, out) == (2, "")
    assert err.startswith("mcore-dsa: error: ")
    assert err.count("\n") == 1
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "plan,verify,convert"),
        (["convert"], "hf2mcore,mcore2hf"),
        (["frobnicate"], "frobnicate"),
        (["plan", "--config", FLASH, "--seq", "8"], "tp"),
        (["plan", "--config", FLASH, "--tp", "0", "--seq", "8"], "PositiveInt"),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", "8", "--partition", "odd"], "'odd'"),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", "8", "--fast"], "--fast"),
        (["verify"], "path"),
    ],
)
def test_a_bad_command_line_ends_with_two(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err


@pytest.mark.parametrize(
    "words", [["plan"], ["verify"], ["convert"], ["convert", "hf2mcore"], ["convert", "mcore2hf"], []]
)
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert "usage: mcore-dsa" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("jsonargparse", ["plan", "--config", FLASH, "--tp", 2, "--seq", 8], "cli"),
        ("matplotlib", ["plan", "--config", FLASH, "--tp", 2, "--seq", 8, "--plot", "work.png"], "plot"),
        ("safetensors", ["convert", "hf2mcore", "{checkpoint}", "target", "--tp", 2], "hf"),
    ],
)
def test_a_missing_library_is_named_with_what_brings_it(
    library: str, words: list[object], extra: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mcore_dsa.cli.arguments", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    status, out, err = command(*(str(word).replace("{checkpoint}", str(checkpoint)) for word in words))
    assert (status, out) == (2, "")
    assert err == f"mcore-dsa: error: {library} is not installed; pip install 'mcore-dsa[{extra}]' brings it\n"
