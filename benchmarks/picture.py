"""The benchmark's picture: work of the slowest rank by partition, and memory over length."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(slowest: Mapping[tuple[int, str], float], peaks: Mapping[int, tuple[int, int]], path: Path) -> None:
    """Write a PNG of (c), the slowest rank's share of the unsharded time, and (e), peak extra memory over length."""
    canvas, (shares, memory) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for kind in dict.fromkeys(kind for _, kind in slowest):
        points = [(1, 1.0), *((size, share) for (size, of), share in slowest.items() if of == kind)]
        shares.plot(*zip(*points, strict=True), marker="o", label=kind)
    sizes = sorted({1, *(size for size, _ in slowest)})
    shares.plot(sizes, [1 / size for size in sizes], color="grey", linestyle=":", label="even")
    shares.set(xlabel="ranks", ylabel="slowest rank / unsharded", xticks=sizes, ylim=(0, None))
    shares.set_title("selection time, one document of 16,384")
    shares.legend()
    lengths = sorted(peaks)
    mebibytes = 1 << 20
    memory.plot(lengths, [peaks[n][0] / mebibytes for n in lengths], marker="o", label="peak extra memory")
    memory.plot(lengths, [peaks[n][1] / mebibytes for n in lengths], marker="o", label="of it the selection itself")
    memory.set(xlabel="tokens", ylabel="MiB", ylim=(0, None), title="memory at a budget of 64 MiB")
    memory.legend()
    canvas.savefig(path, dpi=120)
    plt.close(canvas)
