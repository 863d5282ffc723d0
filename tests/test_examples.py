"""The examples do what they say, in the ranks that their first lines ask for."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"


def as_a_rank(path: str) -> str:
    """What it prints. That `torchrun` starts ranks is `test_train.py`'s; here the harness has, and made their group."""
    dist.init_process_group = lambda backend: None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_an_example_trains_as_its_first_lines_say(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    (ranks,) = re.findall(rf"^    torchrun --standalone --nproc-per-node (\d) examples/{name}$", text, re.MULTILINE)
    printed = "".join(run_ranks(as_a_rank, int(ranks), str(EXAMPLES / name)))
    losses = [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", printed, re.MULTILINE)]
    assert len(losses) == 5
    assert losses[-1] < 0.9 * losses[0]
