"""The byte budget of sparse attention, measured on torch's allocator and on the process."""

import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from attend_cases import Case, smallest_budget
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from live_bytes import allocated_bytes

MIB = 2**20


def passes(case: Case, attend_bytes: int) -> tuple[int, int]:
    """Peak of forward and of backward beyond what the budget leaves out: outputs, and the fp32 sum of kv's gradient.

    That sum, one row longer than kv, is itself the gradient where kv is fp32. Where rows stand, and what follows from
    it, is known beforehand, as to all layers but the first.
    """
    case.q.requires_grad_()
    case.kv.requires_grad_()
    bounds = case.layout.bounds(case.position)
    case.attend(bounds)
    kept: list[torch.Tensor] = []

    def forward() -> None:
        kept.append(case.attend(bounds, attend_bytes=attend_bytes))

    peak, held = allocated_bytes(forward)
    assert held == case.q.nbytes
    backward_peak, backward_held = allocated_bytes(
        lambda: kept.extend(torch.autograd.grad(kept[0], (case.q, case.kv), case.out_grad))
    )
    assert backward_held >= case.q.nbytes + case.kv.nbytes
    sums = case.kv.numel() * 4 + (0 if case.kv.dtype == torch.float32 else case.kv.nbytes)
    return peak - case.q.nbytes, backward_peak - case.q.nbytes - sums


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(1, 80),
    st.sampled_from([1, 4, 7, 64]),
    st.sampled_from([16, 20, 64, 512]),
    st.integers(0, 40),
    st.sampled_from([1.0, 1.5, 4.0]),
)
@hypothesis_settings(max_examples=15)
def test_peak_stays_under_the_budget(dtype, rows, heads, channels, budget, factor) -> None:
    segments = [[(0, 130)], [(3, 127)]]
    case = Case.random(segments, 130, rows=rows, heads=heads, channels=channels, budget=budget).to(dtype)
    attend_bytes = int(factor * smallest_budget(case))
    forward, backward = passes(case, attend_bytes)
    assert forward <= attend_bytes
    assert backward <= attend_bytes


def test_budget_is_used() -> None:
    """A bound far above the truth would waste the budget: backward fills at least half of it."""
    case = Case.random([[(0, 2048)]], 2048, rows=512, heads=8, channels=64, budget=32)
    _, backward = passes(case, 8 * MIB)
    assert backward > 4 * MIB


def test_budget_holds_where_dense_attention_would_break_it() -> None:
    tokens, attend_bytes = 8192, 4 * MIB
    case = Case.random([[(0, tokens)]], tokens, heads=2, channels=16, budget=8)
    assert tokens * tokens >= 16 * attend_bytes  # a mask of one byte a pair
    assert case.tokens().numel() * 16 * 4 >= 4 * attend_bytes  # the latents of all selected tokens
    forward, backward = passes(case, attend_bytes)
    assert max(forward, backward) <= attend_bytes


def test_process_stays_under_the_budget() -> None:
    """Resident memory counts what the allocator's events do not, such as the scratch of a sort inside a kernel."""
    script = """
        import sys, torch
        from attend_cases import Case
        from test_attend_memory import passes  # noqa: F401  (imports everything before the measurement)

        def resident(field):
            with open("/proc/self/status") as status:
                return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))

        torch.set_num_threads(1)
        Case.random([[(0, 64)]], 64).run()
        case = Case.random([[(0, 6000)]], 6000, heads=2, channels=16, budget=16)
        before = resident("VmRSS")
        results = case.run(attend_bytes=int(sys.argv[1]))
        print(resident("VmHWM") - before - sum(x.nbytes for x in results))
    """
    attend_bytes = 16 * MIB
    here = Path(__file__).parent
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(attend_bytes)],
        cwd=here,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    extra = int(run.stdout.split()[-1])
    assert extra <= attend_bytes
    assert extra >= attend_bytes // 4  # else the measurement missed it
