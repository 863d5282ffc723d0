"""Both ways of counting bytes give what a program of known allocations holds."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import allocated_bytes, live_bytes

# Take so many bytes, or (negative) let go of the tensor taken at that place.
STEPS = st.lists(st.integers(-6, 4096).filter(bool), min_size=1, max_size=12)


@given(STEPS)
def test_peak_and_rest_are_those_of_the_program(steps: list[int]) -> None:
    before = torch.ones(1 << 16, dtype=torch.uint8)

    def program() -> list[torch.Tensor]:
        held: list[torch.Tensor] = []
        for step in steps:
            if step > 0:
                # Neither a view nor what was there before is a byte more.
                held.append(before[:step].clone()[: step // 2])
            elif -step <= len(held):
                held.pop(-step - 1)
        return held

    sizes: list[int] = []
    peak = 0
    for step in steps:
        if step > 0:
            sizes.append(step)
        elif -step <= len(sizes):
            sizes.pop(-step - 1)
        peak = max(peak, sum(sizes))
    assert live_bytes(program) == (peak, sum(sizes))
    assert allocated_bytes(program) == (peak, sum(sizes))
