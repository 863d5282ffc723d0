"""README and docs: every command and every piece of code in them is run, and what they name is there."""

import re
from pathlib import Path

import pytest
from harness import megatron_ranks
from pages import LANGUAGES, PAGES, ROOT, blocks, run_python
from shell_blocks import run_commands

from mcore_dsa.settings import read_settings


def _headings(page: Path) -> list[str]:
    """As links name them."""
    lines = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in lines]


def _with(language: str) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in PAGES if any(block.language == language for block in blocks(page))]


def test_every_block_says_what_it_is() -> None:
    assert {block.language for page in PAGES for block in blocks(page)} <= set(LANGUAGES)
    assert "README.md" in _with("python")
    assert "README.md" in _with("sh")


@pytest.mark.parametrize("page", _with("python"))
def test_code_runs_as_it_stands(page: str, tmp_path: Path) -> None:
    megatron_ranks(run_python, 1, page, tmp_path)


@pytest.mark.parametrize("page", _with("sh"))
def test_commands_work_in_the_order_in_which_they_stand(page: str, tmp_path: Path) -> None:
    for block in blocks(ROOT / page):
        if block.language == "sh":
            run_commands(block.code, tmp_path)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_links_variables_and_targets_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, heading in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", text):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not heading or heading in _headings(there), heading
    known = read_settings({}).describe().keys()
    assert set(re.findall(r"\b(?:MCORE_DSA|SKYRL_DSA)_[A-Z_]+", text)) <= known
    makefile = (ROOT / "Makefile").read_text()
    for name in re.findall(r"`make ([a-z]+)", text):
        assert re.search(rf"^{name}: ", makefile, re.MULTILINE), name
    for name in re.findall(r"`((?:tests|docs|examples|mcore_dsa|benchmarks|gpu_ci|configs|patches)/[\w./-]*)`", text):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_with_options_stand_in_blocks_where_they_are_run(page: Path) -> None:
    text = re.sub(r"```[\s\S]*?```", "", page.read_text(encoding="utf-8"))
    commands = re.findall(r"`(?:torchrun|mcore-dsa|pip|make \w+ ARGS)[^`]* -[^`]*`", text)
    assert [words for words in commands if not words.endswith((" ...`", " --help`"))] == []
