"""Data from outside: some thousand cases of `make fuzz`, and what it would find."""

import time
from typing import Any

import fuzz
import pytest
import torch
from fuzz import Target, in_bounds, run_cases, shares, targets
from harness import RanksFailed, run_ranks
from hypothesis import strategies as st

CASES = 5400
# Of targets whose cases take tens of milliseconds; `make fuzz` runs all of them.
AT_MOST = {"payloads": 150}


def wanted() -> dict[str, int]:
    return {name: min(cases, AT_MOST.get(name, cases)) for name, cases in shares(CASES).items()}


# A few processes: each of them imports what all targets need.
PARTS = 2


@pytest.mark.parametrize("part", range(PARTS))
def test_odd_data_ends_as_documented(part: int) -> None:
    """The target's name stands in the traceback, and a case of it among the notes."""
    own = {name: wanted()[name] for name in list(targets())[part::PARTS]}
    (ran,) = run_ranks(in_bounds, 1, own, 7, timeout=280)
    assert all(ran[name] >= cases for name, cases in own.items())


def test_five_thousand_cases_are_dealt_out() -> None:
    assert sum(wanted().values()) >= 5000
    assert sum(shares(fuzz.CASES).values()) >= 100_000


def crash(case: int) -> None:
    if case > 100:
        raise KeyError(case)


def babble(case: int) -> None:
    if case > 100:
        raise ValueError("unsupported operand")


def hang(case: int) -> None:
    while case > 100:
        time.sleep(0.01)


def hoard(case: int) -> None:
    if case > 100:
        torch.empty(2 * fuzz.CASE_BYTES, dtype=torch.uint8)


def die(case: int) -> None:
    if case > 100:
        import ctypes

        ctypes.string_at(0)


def _with(run: Any) -> None:
    fuzz.CASE_SECONDS = 1
    fuzz.targets = lambda: {"bad": Target("bad", st.integers(0, 1000), run, (ValueError,), 1)}  # type: ignore[assignment]
    in_bounds({"bad": 200}, 1)


@pytest.mark.parametrize(
    ("run", "found"),
    [
        (crash, r"KeyError: 101[\s\S]*case=101"),
        (babble, r"UnexplainedError: ValueError\('unsupported operand'\)[\s\S]*case=101"),
        (hang, r"TookTooLong: a case takes more than 1 s[\s\S]*bad, case=\d+"),
        (hoard, r"can't allocate memory[\s\S]*case=101"),
        (die, "killed by SIGSEGV"),
    ],
)
def test_what_no_case_may_do_is_found(run: Any, found: str) -> None:
    with pytest.raises(RanksFailed, match=found):
        run_ranks(_with, 1, run)


def test_a_documented_error_is_none() -> None:
    def refuse(case: int) -> None:
        raise ValueError(f"case is {case}; accepted is nothing")

    assert run_cases(Target("good", st.integers(), refuse, (ValueError,), 1), 50, 1) >= 50
