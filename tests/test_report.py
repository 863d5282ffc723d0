"""The page about a run: what stands on it, that its pictures are pictures, and that a browser shows them."""

import base64
import io
import json
import shutil
import subprocess
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import command
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mcore_dsa.cli import pictures
from mcore_dsa.cli.run_folder import RunFolder
from mcore_dsa.record import SelectionRecord
from mcore_dsa.settings import PARTITION_VARIABLE

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
TITLES = [
    "Loss",
    "Gradient norm",
    "Learning rate",
    "Tokens a second",
    "What selecting takes",
    "Model FLOPs a second",
    "Selections that stay",
    "Work of each rank",
    "Which pools the queries select",
]


def record_of(lengths: tuple[int, ...], *, layers: int, pool_size: int, budget: int, seed: int = 0) -> SelectionRecord:
    """Every row selects some of the pools it sees, drawn anew."""
    generator = torch.Generator().manual_seed(seed)
    selection = torch.full((layers, sum(lengths), budget), -1, dtype=torch.int32)
    row = 0
    for length in lengths:
        for visible in (token // pool_size for token in range(1, length + 1)):
            for layer in range(layers):
                chosen = torch.randperm(visible, generator=generator)[:budget].sort().values
                selection[layer, row, : len(chosen)] = chosen
            row += 1
    recorded = torch.ones(sum(lengths), dtype=torch.bool)
    return SelectionRecord(
        selection_xTK=selection,
        recorded_T=recorded,
        lengths=lengths,
        padded_lengths=lengths,
        pool_size=pool_size,
    )


def write_run(folder: Path, *, steps: int = 30, ranks: int = 4) -> Path:
    (folder / "selections").mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        values = {
            "step": step,
            "loss": 5.0 / step,
            "gradient_norm": 0.5,
            "learning_rate": 1e-3,
            "step_ms": 100.0,
            "tokens_per_s": 2000.0 + step,
            "indexer_ms": 12.0,
            "exchange_ms": 3.0,
            "busiest_over_mean": 1.5,
            "model_flops_per_s": 3.21e9,
            "scored_pairs_of_ranks": [100 * (rank + 1) for rank in range(ranks)],
        }
        seen = {"evaluation_loss": 5.5 / step, "selection_agreement": 0.9} if step % 10 == 0 else {}
        lines.append(json.dumps({**values, **seen}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    ran = {PARTITION_VARIABLE: "contiguous", "kernels": "torch", "device": "CPU with <AVX2>"}
    start = {"steps": 40, "ranks": ranks, "time": "2026-12-03T10:00:00+00:00", "ran": ran}
    starts = [json.dumps({"first_step": first, **start}) for first in (1, 11, 21, 21, 99)]
    (folder / "starts.jsonl").write_text("\n".join(starts) + "\n")
    (folder / "config.yaml").write_text("run_dir: <here> & there\n")
    record_of((40, 300), layers=6, pool_size=4, budget=3).save(folder / "selections/step_00000010.safetensors")
    return folder


class Page(HTMLParser):
    """The pictures, headings and tiles of a page; every element that is opened has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: dict[str, bytes] = {}
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            kind, _, data = str(given["src"]).partition(",")
            assert kind == "data:image/png;base64"
            self.images[str(given["alt"])] = base64.b64decode(data, validate=True)
        assert "http" not in str(given)
        if tag not in ("img", "meta"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_a_page_holds_a_picture_of_everything_that_was_logged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a <run> & more")
    status, out, err = command("report", run, "--json")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert answer == {
        "page": str(run / "report.html"),
        "steps": 30,
        "left_out": [],
        "pictures": TITLES,
    }
    page = Page((run / "report.html").read_text())
    assert list(page.images) == TITLES
    for png in page.images.values():
        image = Image.open(io.BytesIO(png))
        image.load()
        assert min(image.size) > 300
        # Something is drawn on the white.
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10
    for said in ("a <run> & more", "30", "0.1667", "0.1833", "12.0%", "1.500", "3.2 G", "run_dir: <here> & there\n"):
        assert said in page.text
    head = ["Steps 1 to 30 of 40 planned", "4 ranks", "flag contiguous", "torch kernels on CPU with <AVX2>"]
    assert " \u00b7 ".join([*head, "resumed before step 11, 21"]) in page.text
    # The fourth of four ranks has 400 of 1,000 pairs.
    hint = f" The busiest does 1.60 times the mean: {PARTITION_VARIABLE}=zigzag evens it, see mcore-dsa plan."
    assert any(text.endswith(hint) for text in page.text)


def test_the_log_of_a_run_that_crashed_is_shown_with_what_was_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 31, "lo\n[]\n{"step": 32}\n')
    status, out, _ = command("report", run, "--out", tmp_path / "page.html")
    assert status == 0
    assert "30 steps, 9 pictures" in out
    assert "3 lines of metrics.jsonl are no steps" in out
    assert "3 lines of metrics.jsonl are no steps" in (tmp_path / "page.html").read_text()


ODD = st.none() | st.booleans() | st.text(max_size=3) | st.lists(st.integers() | st.text(max_size=2), max_size=2)
ODD |= st.dictionaries(st.text(max_size=2), st.integers(), max_size=2) | st.sampled_from([1e999, -1e999, 10**400])
NUMBERS = ["step", "loss", "gradient_norm", "step_ms", "indexer_ms", "busiest_over_mean", "selection_agreement"]


@settings(max_examples=60, deadline=None)
@given(name=st.sampled_from([*NUMBERS, "scored_pairs_of_ranks"]), value=ODD, at=st.integers(0, 5))
def test_a_line_with_a_value_of_another_kind_is_left_out(name: str, value: Any, at: int) -> None:
    good = {**dict.fromkeys(NUMBERS, 1.5), "scored_pairs_of_ranks": [3, 4]}
    lines = [good | {"step": step} for step in range(1, 6)]
    lines.insert(at, good | {"step": 9} | {name: value})
    sound = name == "scored_pairs_of_ranks" and isinstance(value, list) and all(isinstance(n, int) for n in value)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        run = RunFolder.read(Path(folder))
    assert len(run.steps) == 5 + sound
    assert list(run.left_out) == ["1 lines of metrics.jsonl are no steps and were left out"] * (not sound)
    assert run.series("loss") == [(step["step"], 1.5) for step in run.steps]
    assert run.pairs() == [3, 4] or sound


def test_selections_that_are_damaged_cost_their_picture_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "selections/step_00000020.safetensors").write_bytes(b"cut")
    found = RunFolder.read(run)
    assert (found.record_name, len(found.left_out)) == ("step_00000010.safetensors", 1)
    assert found.left_out[0].startswith("step_00000020.safetensors was left out: ")
    (run / "selections/step_00000010.safetensors").write_bytes(b"cut")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines[:20]:
        # One comparison is a tile, and no line.
        line.pop("selection_agreement", None)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    status, out, _ = command("report", run, "--json")
    assert status == 0
    assert json.loads(out)["pictures"] == [title for title in TITLES[:-1] if title != "Selections that stay"]
    assert "90.0%" in Page((run / "report.html").read_text()).text


def test_an_older_log_has_fewer_pictures(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "tokens_per_s": 10.0}\n')
    status, out, _ = command("report", tmp_path, "--json")
    assert status == 0
    assert json.loads(out)["pictures"] == ["Loss", "Tokens a second"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for said in ("accepted is the folder of a run, with metrics.jsonl", "holds no step; accepted is the log of a run"):
        status, out, err = command("report", tmp_path)
        assert (status, out) == (2, "")
        assert said in err
        (tmp_path / "metrics.jsonl").touch()


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    pool_size=st.integers(1, 5),
    budget=st.integers(1, 4),
    cells=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_a_map_averages_what_each_row_selects_of_what_it_sees(
    lengths: list[int], pool_size: int, budget: int, cells: int, seed: int
) -> None:
    record = record_of(tuple(lengths), layers=1, pool_size=pool_size, budget=budget, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "CELLS", cells)
        share = pictures.selected_share(record, 0)
    length = max(lengths)
    start = record.starts[lengths.index(length)]
    pools = max(1, length // pool_size)
    rows, columns = min(cells, length), min(cells, pools)
    selected, visible = torch.zeros(2, rows, columns)
    for token in range(length):
        for pool in range((token + 1) // pool_size):
            cell = token * rows // length, pool * columns // pools
            visible[cell] += 1
            selected[cell] += pool in record.selection_xTK[0, start + token].tolist()
    assert torch.allclose(share, selected / visible.masked_fill(visible == 0, torch.nan), equal_nan=True)


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome is installed")
def test_a_browser_shows_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert command("report", run)[0] == 0
    shown = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1240,1900"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command_line = [str(BROWSER), *options, profile, f"--screenshot={shown}", (run / "report.html").as_uri()]
    subprocess.run(command_line, check=True, capture_output=True, timeout=120)
    image = Image.open(shown).convert("RGB")
    assert image.size == (1240, 1900)
    # The line of the loss and the bars of the ranks, in the first of the pictures' colours.
    blue = sum(
        count for count, (red, green, blue) in image.getcolors(1 << 22) or [] if (red, green, blue) == (37, 99, 201)
    )
    assert blue > 5000
