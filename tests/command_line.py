"""Commands of `mcore-dsa`, run in the process of a test."""

import contextlib
import io
from pathlib import Path

import hf_checkpoints

from mcore_dsa.cli import main


def command(*words: object) -> tuple[int, str, str]:
    """The status of a command, and what it wrote to stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main([str(word) for word in words])
    return status, out.getvalue(), err.getvalue()


def tiny_checkpoint(folder: Path) -> Path:
    """Two DSA layers and a multi-token-prediction block in three files, at `folder/checkpoint`."""
    config = hf_checkpoints.tiny_config()
    tensors = hf_checkpoints.checkpoint_tensors(config)
    return hf_checkpoints.write_checkpoint(folder / "checkpoint", config, tensors, files=3)
