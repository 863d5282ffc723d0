"""Triton's kernels where there is no GPU: run by its interpreter, and compiled for the GPUs that they are for.

An interpreted function cannot be compiled: each way has a process of its own, over its own files of `kernels/`.
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "kernels"
# Of a processor, whatever else runs; a minute or so each.
MOST_SECONDS = 180


def child_seconds() -> float:
    """Processor time of what this process has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", ["interpret", "compile"])
def test_kernels(way: str, tmp_path: Path) -> None:
    files = sorted(HERE.glob(f"{way}_*.py"))
    assert files
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": str(int(way == "interpret")), "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)]
    before = child_seconds()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
    assert child_seconds() - before <= MOST_SECONDS
