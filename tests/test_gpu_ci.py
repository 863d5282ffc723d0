"""`gpu_ci/` on a machine without a device: collected whole, skipped with reasons, and its script refuses to pass."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_ranks

ROOT = Path(__file__).parents[1]


def collect() -> tuple[int, str]:
    """What pytest does with the folder where there are no devices."""
    os.chdir(ROOT)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = pytest.main(["gpu_ci", "-q", "-rs", "-p", "no:cacheprovider"])
    return int(status), printed.getvalue()


def test_every_test_is_skipped_with_what_it_needs() -> None:
    ((status, printed),) = run_ranks(collect, 1)
    assert status == 0, printed
    assert re.search(r"^\d+ skipped\b", printed.splitlines()[-1]), printed
    skipped = re.findall(r"^SKIPPED \[\d+\] gpu_ci/(\w+\.py):\d+: (.+)$", printed, flags=re.MULTILINE)
    assert {file for file, _ in skipped} == {path.name for path in (ROOT / "gpu_ci").glob("test_*.py")}
    assert {reason for _, reason in skipped} == {"needs a CUDA device", "needs two CUDA devices, there are 0"}


def test_the_script_runs_every_file_in_the_order_of_the_page() -> None:
    """And stops at the first that fails: what rests on nothing else stands in front."""
    script = (ROOT / "gpu_ci" / "run.sh").read_text()
    (names,) = re.findall(r"^tests=\((.*)\)$", script, flags=re.MULTILINE)
    assert names.split()[:3] == ["triton_selection", "triton_attention", "sanitizer"]
    assert sorted(f"test_{name}.py" for name in names.split()) == sorted(
        p.name for p in (ROOT / "gpu_ci").glob("test_*")
    )
    assert 'pytest "${files[@]/%/.py}" -x' in script


def test_the_script_fails_without_a_device() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    command = ["bash", "gpu_ci/run.sh"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "there is no CUDA device here" in done.stderr
