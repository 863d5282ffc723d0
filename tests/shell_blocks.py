"""The commands of README and docs, each run as far as a test can: on a tiny model or checkpoint, or looked up."""

import contextlib
import io
import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from command_line import command, tiny_checkpoint
from pages import ROOT
from train_runs import TINY, start, write_indexed

from mcore_dsa.settings import read_settings
from mcore_dsa.train.config import JobConfig, parse_config

# Steps as they stand in a command, over those of the run in a test.
FEWER = 50


def run_commands(code: str, folder: Path) -> None:
    """The lines of a block, one after the other; all that they leave goes into `folder`."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            variable, _, value = words.pop(0).partition("=")
            assert read_settings({variable: value}).describe().get(variable) is not None, line
            read_settings({variable: value}).raise_faults()
        if words:
            name = words[0].rpartition("/")[2]
            assert name in _RUN, f"no test knows how to run: {line}"
            _RUN[name](words[1:], folder)


def _make(words: Sequence[str], folder: Path) -> None:
    target, *arguments = words
    assert re.search(rf"^{target}: ", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    values = dict(argument.split("=", 1) for argument in arguments)
    assert set(values) <= {"ARGS"}
    if target == "train":
        _train(["--config", "configs/tiny_tp2.yaml", *shlex.split(values.get("ARGS", ""))], 2, folder)


def _torchrun(words: Sequence[str], folder: Path) -> None:
    ranks = int(words[words.index("--nproc-per-node") + 1])
    if "-m" in words:
        at = words.index("-m")
        assert words[at + 1] == "mcore_dsa.train"
        _train(words[at + 2 :], ranks, folder)
    else:
        # tests/test_examples.py runs each as it says itself, which has to be this.
        example = ROOT / words[-1]
        assert shlex.join(["torchrun", *words]) in example.read_text()


def _train(options: Sequence[str], ranks: int, folder: Path) -> None:
    """Train with fewer steps on a tiny model, in a folder for each of the command's own."""
    asked = parse_config([str(ROOT / word) if word.startswith("configs/") else word for word in options])
    start(_smaller(asked, options, folder), ranks)


def _smaller(asked: JobConfig, options: Sequence[str], folder: Path) -> JobConfig:
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in options]
    sizes = dict(zip(TINY[::2], TINY[1::2], strict=True))
    batches = {"--training.micro_batch_size", "--training.global_batch_size"}
    if asked.pack or asked.model.host == "hybrid":
        sizes = {name: value for name, value in sizes.items() if name not in batches | {"--model.num_layers"}}
        sizes["--training.sequence_length"] = "128"
    if asked.data == ["PREFIX"]:
        sizes["--data"] = write_indexed(folder / "ids", [list(range(100))] * 20)
    sizes |= {"--training.steps": str(max(2, asked.training.steps // FEWER)), "--run_dir": str(folder / asked.run_dir)}
    if asked.training.decay_steps is None:
        sizes["--training.decay_steps"] = "null"
    else:
        sizes["--training.decay_steps"] = str(asked.training.decay_steps // FEWER)
    return parse_config([*words, *(word for pair in sizes.items() for word in pair)])


def _mcore_dsa(words: Sequence[str], folder: Path) -> None:
    """`DIR` is a checkpoint; what else is in capitals are new names, and what an earlier command left is found."""
    if not (folder / "checkpoint").exists():
        tiny_checkpoint(folder)
    places = {"DIR": "checkpoint", "config.json": "checkpoint/config.json"}
    found = []
    for word in words:
        is_path = word in places or re.fullmatch(r"[A-Z]+[0-9]?", word) or (folder / word).exists()
        found.append(str(folder / places.get(word, word)) if is_path else word)
    if "--tp" in found:
        # The tiny model has four heads.
        found[found.index("--tp") + 1] = "2"
    status, out, err = command(*found)
    assert status == 0, (words, out, err)


def _pip(words: Sequence[str], folder: Path) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert words[0] == "install"
    for word in words[1:]:
        match = re.fullmatch(r"(?:\.|mcore-dsa)(?:\[([a-z,]+)\])?|-e|torch", word)
        assert match, words
        assert set((match[1] or "hf").split(",")) <= set(extras), words


def _bash(words: Sequence[str], folder: Path) -> None:
    subprocess.run(["bash", "-n", str(ROOT / words[0])], check=True)


def _python(words: Sequence[str], folder: Path) -> None:
    assert list(words) == ["-m", "mcore_dsa.train", "--help"]
    with pytest.raises(SystemExit, match="0"), contextlib.redirect_stdout(io.StringIO()) as out:
        parse_config(["--help"])
    assert "--training.steps" in out.getvalue()


def _git(words: Sequence[str], folder: Path) -> None:
    assert list(words) == ["lfs", "pull"]


_RUN: dict[str, Callable[[Sequence[str], Path], None]] = {
    "make": _make,
    "torchrun": _torchrun,
    "mcore-dsa": _mcore_dsa,
    "pip": _pip,
    "bash": _bash,
    "git": _git,
    "python": _python,
}
