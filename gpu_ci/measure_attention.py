"""What sparse attention in Triton costs on this device, to be copied into benchmarks/LOG.md: see run.sh."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from attend_cases import Case
from measure import BUDGETS, milliseconds
from on_device import DEVICE
from test_triton_attention import attended, run

from mcore_dsa import PoolLayout
from mcore_dsa.settings import bytes_text

TOKENS, BUDGET, CHANNELS = 65_536, 512, 512


def bare_flops_per_millisecond() -> float:
    """What square bf16 products reach on this device."""
    left, right = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / milliseconds(lambda: left @ right)


def recent_case(heads: int, rows: int) -> Case:
    """The last rows of one document, which select pools at random, each its own."""
    layout = PoolLayout.dense(TOKENS, pool_size=4, device=DEVICE)
    position = torch.arange(TOKENS - rows, TOKENS, device=DEVICE)
    chance = torch.rand(rows, (TOKENS - rows) // 4, device=DEVICE)
    selection = chance.topk(BUDGET, dim=1).indices.sort(1).values.int().unsqueeze(0)
    shape = (rows, 1, heads, CHANNELS)
    q, out_grad = (torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    kv = torch.randn(TOKENS, 1, CHANNELS, device=DEVICE, dtype=torch.bfloat16)
    return Case(q, kv, selection, layout, position, out_grad, scale=CHANNELS**-0.5)


def run_queries(case: Case) -> None:
    """Forward, and the gradient of queries alone."""
    q = case.q.detach().requires_grad_()
    torch.autograd.grad(attended(case, q, case.kv), q, case.out_grad)


def report(heads: int, rows: int, bare: float) -> None:
    case = recent_case(heads, rows)
    forward = milliseconds(lambda: attended(case, case.q, case.kv))
    products = 2.0 * rows * heads * (BUDGET * 4 + 2) * CHANNELS
    gathered = rows * (BUDGET * 4 + 2) * CHANNELS * 2 * -(-heads // 16)
    print(f"attention of {rows:,} rows, {heads} heads, {TOKENS:,} tokens: forward {forward:.2f} ms")
    print(f"  3 products, {3 * products / forward / bare:.1%} of the bare ones; {gathered / forward / 1e9:.2f} TB/s")
    for attend_bytes in BUDGETS:
        backward = milliseconds(partial(run, case, attend_bytes=attend_bytes)) - forward
        share = 10 * products / backward / bare
        print(
            f"  backward under {bytes_text(attend_bytes)} {backward:.2f} ms, 10 products, {share:.1%} of the bare ones"
        )
    alone = milliseconds(partial(run_queries, case)) - forward
    print(f"  of which the gradient of queries {alone:.2f} ms")
    # The sum of that pool's gradients is one chain over the rows.
    shared = replace(case, selection=case.selection.clone())
    shared.selection[..., 0] = 0
    print(f"  backward where every row selects one pool {milliseconds(partial(run, shared)) - forward:.2f} ms")
    few = case.rows(slice(0, 128))
    few = replace(few, position=case.position[:128])
    compared: list[tuple[str, Callable[[Case], object]]] = [("triton", run), ("torch", Case.run)]
    for name, call in compared:
        print(f"  128 of the rows forward and backward, {name}: {milliseconds(partial(call, few)):.2f} ms")


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}")
    torch.manual_seed(0)
    peak = bare_flops_per_millisecond()
    for own_heads, own_rows in ((8, 8192), (64, 1024)):
        report(own_heads, own_rows, peak)
