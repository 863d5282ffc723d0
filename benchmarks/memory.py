"""(e) Peak extra memory of `select_pools`, pooled keys given. Run as a program: one length, one line of JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.cases import BUDGET, Inputs
from mcore_dsa import select_pools

SCORE_BYTES = 64 << 20


def peak_extra_bytes(length: int) -> tuple[int, int]:
    """`(peak, outputs)` in bytes of a call over `length` tokens, measured in a fresh process.

    The peak is the resident high-water mark of the call over what was resident before it.
    """
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", str(length)], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    return measured["peak"], measured["outputs"]


def _status_bytes(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def _measure(length: int) -> None:
    torch.set_num_threads(1)
    inputs = Inputs.of(length)
    # Libraries map their own workspace at the first call, whatever its size.
    small = Inputs.of(4096)
    small.select()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    selection = select_pools(
        inputs.q, inputs.weights, inputs.pool_key, inputs.layout, budget=BUDGET, score_bytes=SCORE_BYTES
    )
    peak = _status_bytes("VmHWM") - before
    print(json.dumps({"peak": peak, "outputs": selection.numel() * selection.element_size()}))


if __name__ == "__main__":
    _measure(int(sys.argv[1]))
