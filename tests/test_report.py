"""The page about a run: what stands on it, that its pictures are pictures, and that a browser shows them."""

import base64
import io
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from command_line import command
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mcore_dsa.cli import pictures
from mcore_dsa.record import SelectionRecord

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
TITLES = [
    "Loss",
    "Tokens a second",
    "What selecting takes",
    "Work of each rank",
    "Model FLOPs a second",
    "Selections that stay",
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
            "step_ms": 100.0,
            "tokens_per_s": 2000.0 + step,
            "indexer_ms": 12.0,
            "exchange_ms": 3.0,
            "busiest_over_mean": 1.5,
            "model_flops_per_s": 3e12,
            "scored_pairs_of_ranks": [100 * (rank + 1) for rank in range(ranks)],
        }
        seen = {"evaluation_loss": 5.5 / step, "selection_agreement": 0.9} if step % 10 == 0 else {}
        lines.append(json.dumps({**values, **seen}))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
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
        "lines_left_out": 0,
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
    for said in ("a <run> & more", "30", "0.1667", "0.1833", "12.0%", "1.500", "run_dir: <here> & there\n"):
        assert said in page.text


def test_the_log_of_a_run_that_crashed_is_shown_with_what_was_lost(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 31, "lo\n[]\n{"step": 32}\n')
    status, out, _ = command("report", run, "--out", tmp_path / "page.html")
    assert status == 0
    assert "30 steps, 7 pictures" in out
    assert "3 lines of metrics.jsonl are no steps" in out
    assert "3 lines of its log are no steps" in (tmp_path / "page.html").read_text()


def test_an_older_log_has_fewer_pictures(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 5.0, "tokens_per_s": 10.0}\n')
    status, out, _ = command("report", tmp_path, "--json")
    assert status == 0
    assert json.loads(out)["pictures"] == TITLES[:2]


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
