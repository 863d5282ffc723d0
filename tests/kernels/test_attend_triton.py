"""Sparse attention in Triton without a card: run in the interpreter, and compiled ahead of time.

Two processes, for an interpreted kernel cannot be compiled.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize(("file", "interpret"), [("attend_interpreted.py", "1"), ("attend_compiled.py", "0")])
def test_in_a_process_of_its_own(file: str, interpret: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
