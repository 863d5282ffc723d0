"""What one rank finds is every rank's, once, with the ranks that have it."""

from typing import Any

import torch.distributed as dist
from harness import run_ranks


def told(faults: list[list[str | None]], values: list[dict[str, Any]]) -> list[str]:
    """What a rank of four is told, of faults by rank and of values by rank."""
    from mcore_dsa.train.together import refuse_differences, refuse_together, told_to_every_rank

    rank, lines = dist.get_rank(), []

    def without_text() -> None:
        with told_to_every_rank("the file"):
            if rank == 1:
                raise ValueError

    steps = [lambda own=own: refuse_together(own[rank]) for own in faults]
    for step in [*steps, without_text, lambda: refuse_differences(values[rank])]:
        try:
            step()
        except ValueError as error:
            lines.append(str(error))
        else:
            lines.append("")
    return lines


def test_each_fault_is_told_once_to_every_rank() -> None:
    faults = [[None] * 4, ["a"] * 4, ["a", "b", None, None], [None, "b", None, "b"], [None, "b", "c", "b"]]
    of_one = {"run_dir": "run", "training": {"steps": 4, "lr": 0.1}}
    other = {"run_dir": "run", "training": {"steps": 5, "lr": 0.1}}
    of_ranks = run_ranks(told, 4, faults, [of_one, other, of_one | {"run_dir": "else"}, other])
    assert all(lines == of_ranks[0] for lines in of_ranks)
    *together, without_text, differences = of_ranks[0]
    assert together == ["", "a", "a", "b (ranks 1, 3)", "b (ranks 1, 3)"]
    assert without_text == "the file: ValueError (rank 1)"
    assert differences.splitlines() == [
        "run_dir is 'else' on rank 2; accepted is rank 0's, 'run'",
        "training.steps is 5 on ranks 1, 3; accepted is rank 0's, 4",
    ]
