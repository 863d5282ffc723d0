"""`make bench`: ratios of selection and attention, measured side by side in one run, and what they should be.

Nothing is printed unless the exactness tests pass first. Absolute times mean nothing on a shared machine; every figure
is the median of ratios of two things timed one after the other, on one thread by default.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from benchmarks import attention, cases, memory
from benchmarks.picture import draw
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.work import selection_work

ROOT = Path(__file__).resolve().parents[1]
EXACTNESS = ("test_scoring.py", "test_selection.py", "test_selection_contract.py", "test_sharded.py", "test_row_cut.py")


@dataclass(frozen=True)
class Figure:
    """A measured ratio: its median and all repetitions, the bar it must meet and the aim."""

    name: str
    median: float
    repetitions: list[float]
    bar: float | None = None
    at_least: bool = False
    aim: float | None = None

    @property
    def met(self) -> bool:
        if self.bar is None:
            return True
        return self.median >= self.bar if self.at_least else self.median <= self.bar

    def row(self) -> str:
        sign = ">=" if self.at_least else "<="
        bar = "" if self.bar is None else f"{sign} {self.bar:g}"
        aim = "" if self.aim is None else f"{self.aim:g}"
        spread = f"{min(self.repetitions):.3f} ... {max(self.repetitions):.3f}"
        return f"{self.name:<58} {self.median:>8.3f} {spread:>18} {bar:>9} {aim:>6} {'' if self.met else 'MISSED'}"


def figure(name: str, ratios: list[float], **limits: float | bool) -> Figure:
    return Figure(name, median(ratios), ratios, **limits)  # type: ignore[arg-type]


def measure(
    repetitions: int, lengths: list[int]
) -> tuple[list[Figure], dict[tuple[int, str], float], dict[int, tuple[int, int]]]:
    """All figures, and for the picture the medians of (c) and the bytes of (e)."""
    figures = [
        figure("(a) selection / bare products", cases.over_bare_products(repetitions), bar=1.6, aim=1.3),
        figure("(b) baseline / selection", cases.baseline_over_selection(repetitions), bar=4, aim=5.2, at_least=True),
    ]
    limits = {(2, "zigzag"): {"bar": 0.54, "aim": 0.52}, (2, "contiguous"): {"bar": 0.80, "aim": 0.77}}
    slowest = cases.slowest_rank_over_unsharded(repetitions)
    for (size, kind), ratios in slowest.items():
        name = f"(c) slowest of {size} ranks / unsharded, {kind}"
        figures.append(figure(name, ratios, **limits.get((size, kind), {})))
    packed = cases.pack_over_document(repetitions)
    figures.append(figure("(d) 8 documents of 4,096 / 1 of 32,768", packed, bar=0.14, aim=0.11))
    for name, ratios in attention.over_bare_products(repetitions).items():
        limits_of_pass = {"aim": 1.5} if name == "forward" else {}
        figures.append(figure(f"(f) attention of 64 heads / bare products, {name}", ratios, **limits_of_pass))
    for (size, name), ratios in attention.heads_over_rows(repetitions).items():
        limits_of_size = {"aim": 2.0} if size == 8 else {}
        figures.append(
            figure(f"(g) attention by heads / by rows, {size} ranks, {name}", ratios, at_least=True, **limits_of_size)
        )
    peaks = {length: memory.peak_extra_bytes(length) for length in lengths}
    for length, (peak, outputs) in peaks.items():
        ratio = (peak - outputs) / memory.SCORE_BYTES
        figures.append(figure(f"(e) peak extra memory less outputs / 64 MiB, {length:,} tokens", [ratio], bar=1.1))
    geometry = DsaGeometry.from_config(ROOT / "configs" / "glm-5.3-flash.json")
    even = selection_work([524288], geometry, group_size=8, partition="zigzag").busiest_over_mean
    figures.append(figure("zigzag: busiest of 8 / mean, one document of 524,288", [even], bar=1.01))
    mix = selection_work(cases.document_mix(), geometry, group_size=8, partition="balanced").busiest_over_mean
    figures.append(figure("balanced: the same, 1,000 documents of 16 ... 60,000", [mix], bar=1.02))
    return figures, {key: median(ratios) for key, ratios in slowest.items()}, peaks


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3, help="interleaved repetitions of each ratio (default 3)")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768, 65536], help="tokens, for (e)")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench", help="folder for the JSON and the picture")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default 1)")
    arguments = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    if not 1 <= arguments.threads <= cores:
        parser.error(f"--threads is {arguments.threads}; accepted are 1 to {cores}, the cores of this machine")
    if arguments.repetitions < 1 or min(arguments.lengths) < 1:
        parser.error("--repetitions and --lengths are 1 or more")
    torch.set_num_threads(arguments.threads)
    tests = [str(ROOT / "tests" / name) for name in EXACTNESS]
    if subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=ROOT).returncode:
        print("the exactness tests fail: no figure is measured", file=sys.stderr)
        return 1
    figures, slowest, peaks = measure(arguments.repetitions, arguments.lengths)
    print(f"{'':<58} {'median':>8} {'least ... most':>18} {'bar':>9} {'aim':>6}")
    print("\n".join(entry.row() for entry in figures))
    arguments.out.mkdir(parents=True, exist_ok=True)
    record = {"torch": torch.__version__, "figures": [asdict(entry) | {"met": entry.met} for entry in figures]}
    record["peak_bytes"] = {str(length): {"peak": peak, "outputs": out} for length, (peak, out) in peaks.items()}
    (arguments.out / "selection.json").write_text(json.dumps(record, indent=2) + "\n")
    draw(slowest, peaks, arguments.out / "selection.png")
    print(f"written: {arguments.out / 'selection.json'}, {arguments.out / 'selection.png'}")
    return 0 if all(entry.met for entry in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
