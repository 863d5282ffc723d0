"""Every Triton kernel under compute-sanitizer, where it is installed: lanes outside of their buffers, unwritten bytes.

`racecheck` looks at shared memory alone: it sees what the compiler puts there, and nothing of the barriers between a
program's own stores to global memory and its loads (`test_a_hundred_repetitions_are_equal`).
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer"),
]

SELECTION = """
import test_triton_selection as t
call = t.glm_call("plateau", every=900)
t.select(call, t.smallest(call))
t.select(call)
t.test_compressed_keys_have_the_bits_of_the_cpu()
"""
ATTENTION = """
import torch
from attend_cases import Case
import test_triton_attention as t
for heads, channels, pool_size in ((8, 512, 4), (40, 20, 3)):
    case = Case.random([[(0, 70), (70, 73), (80, 150)], [(3, 140)]], 150, rows=9, budget=9, heads=heads,
                       channels=channels, pool_size=pool_size)
    t.run(t.moved(case.to(torch.bfloat16)))
"""


@pytest.mark.parametrize("tool", ["memcheck", "initcheck", "racecheck"])
@pytest.mark.parametrize("program", [SELECTION, ATTENTION], ids=["selection", "attention"])
def test_no_lane_is_out_of_bounds_or_ahead(program: str, tool: str) -> None:
    """Ragged rows, in several blocks; every tensor an allocation of its own, or a lane would end in its neighbour."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", program]
    folder = Path(__file__).parent
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
