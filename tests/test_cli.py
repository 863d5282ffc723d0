"""The command line: what it plans, how it answers, what it imports."""

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
from mcore_dsa.attention_work import attention_work
from mcore_dsa.cli import main
from mcore_dsa.settings import bytes_text
from mcore_dsa.tp_plan import DsaTpPlan
from mcore_dsa.work import CONTEXT_PARTITIONS, best_partition, selection_work

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
        kind: selection_work(lengths, geometry, group_size=8, partition=kind, kernels="triton", score_bytes=8 << 30)
        for kind in ("off", "contiguous", "zigzag", "balanced")
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
    best, _ = (line for line in out.splitlines() if "(best)" in line)
    assert best.startswith("zigzag (best)")


def test_both_cuts_of_the_attention_are_the_work_models() -> None:
    words = ("plan", "--config", FLASH, "--tp", 8, "--seq", 65536)
    attention = plan(*words[1:])["attention"]
    geometry = DsaGeometry.from_config(FLASH)
    assert attention["partition"] == "zigzag"
    for shard, entry in attention["shards"].items():
        sizes = {"group_size": 8, "partition": "zigzag", "kernels": "triton", "attend_bytes": 8 << 30}
        work = attention_work([65536], geometry, shard=shard, **sizes)
        assert entry["ranks"] == [vars(rank) for rank in work]
        assert entry["transfer_seconds"] == max(rank.transfer_seconds for rank in work)
    assert attention["best"] == "rows"
    _, out, _ = command(*words)
    heads, rows = (
        next(line for line in out.splitlines() if line.startswith(f"by {shard}")) for shard in ("heads", "rows")
    )
    assert rows.startswith("by rows (best)")
    assert heads.split()[-1] == f"{1e3 * attention['shards']['heads']['transfer_seconds']:.1f}"


@pytest.mark.parametrize(
    ("words", "kernels", "device", "budget"),
    [
        ((), "triton", 139 << 30, 8 << 30),
        (("--device-bytes", "80GiB"), "triton", 80 << 30, 4 << 30),
        (("--kernels", "torch", "--device-bytes", "1MiB"), "torch", 1 << 20, 256 << 20),
    ],
)
def test_what_is_assumed_is_said(words: tuple[str, ...], kernels: str, device: int, budget: int) -> None:
    words = ("--config", FLASH, "--tp", "2", "--seq", "4096", *words)
    report = plan(*words)
    assert report["assumed"] == {
        "kernels": kernels,
        "device_bytes": device,
        "score_bytes": budget,
        "attend_bytes": budget,
    }
    assert report["attention"]["shards"]["heads"]["ranks"][0]["peak_bytes"] == budget
    first = f"Assumed: {kernels} kernels in BF16 on CUDA devices of {bytes_text(device)}, where {bytes_text(budget)} of"
    assert first in command("plan", *words)[1]


def test_a_geometry_that_triton_does_not_take_runs_in_torch(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(tiny_config()))
    words = ("plan", "--config", str(file), "--tp", "2", "--seq", "256")
    assert plan(*words[1:])["assumed"]["kernels"] == "torch"
    status, _, err = command(*words, "--kernels", "triton")
    assert status == 2
    assert "--kernels is triton and dim is 20; accepted are multiples of 16 up to 128" in err


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
    told = {
        kind: [
            (rank.rows, rank.visible_pairs, rank.scored_pairs)
            for rank in selection_work(lengths, geometry, group_size=tp, partition=kind, context_size=cp).ranks
        ]
        for kind in CONTEXT_PARTITIONS
    }
    assert told["off"] == [(len(busiest), *counted(geometry, lengths, busiest))] * tp
    for kind, parts in (("contiguous", tp), ("zigzag", 2 * tp)):
        size = -(-len(busiest) // parts)
        slices = [busiest[part * size : (part + 1) * size] for part in range(parts)]
        shards = slices if kind == "contiguous" else [slices[rank] + slices[-1 - rank] for rank in range(tp)]
        assert told[kind] == [(len(shard), *counted(geometry, lengths, shard)) for shard in shards]


def test_bytes_under_context_parallelism() -> None:
    geometry, rows = DsaGeometry.from_config(FLASH), 65536
    report = plan("--config", FLASH, "--tp", 4, "--cp", 4, "--seq", rows)
    selection = report["selection"]
    assert selection["partitions"].keys() == {"off", "contiguous", "zigzag"}
    assert selection["best"] == selection["partition"] == "zigzag"
    key_row, ids = 2 * 2 * geometry.index_head_dim, 4 * geometry.pool_budget
    for rank in selection["partitions"]["contiguous"]["ranks"]:
        # Keys and gates of all other ranks' rows, and the selections of this group's, in pieces with their numbers.
        assert rank["received_bytes"] == (rows - rows // 16) * key_row + 3 * (rows // 16 + 4) * ids
        assert rank["peak_bytes"] > 2 * rows * key_row
        assert rank["flops"] == 2 * 32 * 128 * rank["scored_pairs"]
    assert sum(rank["rows"] for rank in selection["partitions"]["zigzag"]["ranks"]) == rows // 4
    latents = 2 * geometry.kv_lora_rank * rows
    assert report["latents"] == {
        "received_bytes": 3 * latents // 4,
        "held_bytes": latents,
        "saved_bytes": latents // 4,
    }
    _, out, _ = command("plan", "--config", FLASH, "--tp", 4, "--cp", 4, "--seq", rows)
    assert out.splitlines()[-1].split() == [f"{size:,}" for size in report["latents"].values()]


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
    shards = report["attention"]["shards"]
    heights = {
        tick.get_text(): sum(bar.get_height() for bar in bars)
        for tick, bars in zip(
            figures[0].axes[1].get_xticklabels(),
            zip(*[iter(bar for container in figures[0].axes[1].containers for bar in container)] * 2, strict=True),
            strict=True,
        )
    }
    assert heights == {f"by {shard}": pytest.approx(1e3 * entry["transfer_seconds"]) for shard, entry in shards.items()}


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


@pytest.mark.parametrize(
    ("words", "without"),
    [
        (["--version"], {"torch"}),
        (["--help"], {"torch"}),
        (["plan", "--help"], {"torch"}),
        (["convert", "hf2mcore", "--help"], {"torch"}),
        (["verify", "{checkpoint}"], {"torch", "safetensors"}),
        (["plan", "--config", FLASH, "--tp", "64", "--seq", "1048576"], {"matplotlib", "safetensors"}),
        (["convert", "hf2mcore", "{checkpoint}", "{tmp}/ranks", "--tp", "2"], {"matplotlib"}),
    ],
)
def test_a_command_imports_what_it_needs(words: list[str], without: set[str], checkpoint: Path, tmp_path: Path) -> None:
    """torch alone takes more than a second of CPU."""
    program = """
import sys
from mcore_dsa.cli import main
try:
    status = main(sys.argv[2:])
except SystemExit as end:
    status = end.code
print(status, sorted(set(sys.argv[1].split(",")) & sys.modules.keys()))
"""
    filled = [word.replace("{checkpoint}", str(checkpoint)).replace("{tmp}", str(tmp_path)) for word in words]
    refused = ",".join({"megatron", "transformers", *without})
    done = subprocess.run([sys.executable, "-c", program, refused, *filled], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


def test_the_installed_command_ends_quietly_when_its_reader_does() -> None:
    command = Path(sys.executable).with_name("mcore-dsa")
    words = [command, "plan", "--config", FLASH, "--tp", "64", "--seq", "65536"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


@pytest.mark.parametrize(
    "words", [["plan"], ["verify"], ["convert"], ["convert", "hf2mcore"], ["convert", "mcore2hf"], []]
)
def test_every_command_explains_itself(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*words, "--help"])
    assert "usage: mcore-dsa" in capsys.readouterr().out
