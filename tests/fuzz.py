"""`make fuzz`: everything that takes data from outside is called with data that nobody should have passed.

A case either succeeds or ends in one of the errors that the entry documents, with what is accepted in its place, within
bounds of time and memory that a sound case never comes near. Cases are those of a seed, one process for some of them.
"""

import argparse
import faulthandler
import math
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

# A sound case takes milliseconds and some megabytes.
CASE_SECONDS = 60
CASE_BYTES = 2**30
# Of one process: hypothesis remembers what it has tried.
PROCESS_CASES = 2000
# Of all cases, with shares of all targets together.
CASES = 100_000


@dataclass(frozen=True)
class Target:
    """One entry, or a few that take the same data.

    Attributes:
        name: what it is called by.
        cases: what to call it with.
        run: the call; it raises AssertionError where the entry gives what it must not.
        errors: what the entry documents to raise.
        share: of all cases, relative to the others.
        explains: whether its errors are all its own and say what is accepted.
        prepare: what its cases are made of, once, before bounds hold.
    """

    name: str
    cases: SearchStrategy[Any] = field(repr=False)
    run: Callable[[Any], None]
    errors: tuple[type[Exception], ...]
    share: int
    explains: bool = True
    prepare: Callable[[], object] = lambda: None


class TookTooLong(BaseException):
    """A case ran into the limit of time; no exception, for hypothesis would look for a smaller case that does."""


class UnexplainedError(Exception):
    """An error of a documented type that does not say what is accepted."""


def targets() -> dict[str, Target]:
    """All targets by name."""
    # Here, because they import this module.
    import fuzz_calls
    import fuzz_files
    import fuzz_records
    import fuzz_runs

    found = (*fuzz_calls.TARGETS, *fuzz_files.TARGETS, *fuzz_records.TARGETS, *fuzz_runs.TARGETS)
    return {target.name: target for target in found}


def shares(cases: int) -> dict[str, int]:
    """`cases` dealt out to the targets, no fewer in all."""
    found = targets()
    whole = sum(target.share for target in found.values())
    return {name: math.ceil(cases * target.share / whole) for name, target in found.items()}


def run_cases(target: Target, cases: int, number: int) -> int:
    """Run the cases of seed `number` in this process, and return how many there were.

    Raises: what a case raised that the target does not document, with the least such case among its notes.
    """
    ran = 0

    @seed(number)
    @settings(
        max_examples=cases,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(target.cases)
    def run(case: Any) -> None:
        nonlocal ran
        ran += 1
        signal.alarm(CASE_SECONDS)
        try:
            target.run(case)
        except target.errors as error:
            # One's own refusal says so; a library's, which was given what it should not have been, does not.
            if target.explains and not isinstance(error, OSError) and "accepted" not in str(error):
                raise UnexplainedError(repr(error)) from error
        except TookTooLong as error:
            error.add_note(f"{target.name}, case={case!r}")
            raise
        finally:
            signal.alarm(0)

    run()
    return ran


def in_bounds(cases: Mapping[str, int], number: int) -> dict[str, int]:
    """`run_cases` of some targets where no case can take more time or address space than it may.

    For a process of its own, which stays within its bounds.
    """

    def too_long(signum: int, frame: FrameType | None) -> None:
        raise TookTooLong(f"a case takes more than {CASE_SECONDS} s")

    faulthandler.enable()
    known = targets()
    for name in cases:
        known[name].prepare()
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + CASE_BYTES,) * 2)
    signal.signal(signal.SIGALRM, too_long)
    return {name: run_cases(known[name], some, number) for name, some in cases.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    from harness import RanksFailed, run_ranks

    parser = argparse.ArgumentParser(prog="tests/fuzz.py", description=__doc__)
    parser.add_argument("--cases", type=int, default=CASES, help=f"in all (default {CASES:,})")
    parser.add_argument("--seed", type=int, default=0, help="of the first process of each target (default 0)")
    parser.add_argument("--target", choices=sorted(targets()), action="append", help="only these; by default all")
    options = parser.parse_args(arguments)
    done = failed = 0
    begun = time.monotonic()
    for name, cases in shares(options.cases).items():
        if options.target and name not in options.target:
            continue
        ran, number = 0, options.seed
        while ran < cases:
            part = min(PROCESS_CASES, cases - ran)
            try:
                (more,) = run_ranks(in_bounds, 1, {name: part}, number, timeout=CASE_SECONDS + part)
            except RanksFailed as error:
                print(f"{error}\nagain with: --target {name} --seed {number} --cases {options.cases}", flush=True)
                failed += 1
                break
            ran, number = ran + more[name], number + 1
        done += ran
        print(f"{name}: {ran:,} cases, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"{done:,} cases of seed {options.seed}, {failed} targets failed")
    return 1 if failed else 0


if __name__ == "__main__":
    # Ranks import the module under its own name, and so do the targets.
    import fuzz

    sys.exit(fuzz.main())
