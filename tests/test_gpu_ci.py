"""`gpu_ci/` on a machine without a device: collected whole, skipped with reasons, and its script refuses to pass."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)


def test_every_test_is_skipped_with_what_it_needs() -> None:
    done = run(sys.executable, "-m", "pytest", "gpu_ci", "-q", "-rs", "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\d+ skipped\b", done.stdout.splitlines()[-1]), done.stdout
    skipped = re.findall(r"^SKIPPED \[\d+\] gpu_ci/(\w+\.py):\d+: (.+)$", done.stdout, flags=re.MULTILINE)
    assert {file for file, _ in skipped} == {path.name for path in (ROOT / "gpu_ci").glob("test_*.py")}
    assert {reason for _, reason in skipped} == {"needs a CUDA device", "needs two CUDA devices, there are 0"}


def test_the_script_fails_without_a_device() -> None:
    done = run("bash", "gpu_ci/run.sh")
    assert done.returncode == 1
    assert "there is no CUDA device here" in done.stderr
