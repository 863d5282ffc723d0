"""The examples do what they say, as a reader would start them."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_trains_as_its_first_lines_say(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    (options,) = re.findall(rf"^    torchrun (.*) examples/{name}$", text, re.MULTILINE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options.split(), str(EXAMPLES / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
