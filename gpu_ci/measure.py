"""What selection and attention cost on this device, as ratios to be copied into benchmarks/LOG.md: see run.sh."""

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from on_device import DEVICE, moved, requested_at_peak
from test_attention import glm_case

from benchmarks.cases import BUDGET, DIM, HEADS, Inputs
from mcore_dsa import select_pools
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.choice import Target, triton_refusal
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.backends.torch.scoring import tile_for
from mcore_dsa.backends.triton import TritonBackend
from mcore_dsa.settings import DEFAULT_BYTES, bytes_text, default_bytes
from mcore_dsa.workspace import device_bytes

TOKENS = (8192, 65536)
# Without a device of its own memory, and what a module has here.
BUDGETS = (DEFAULT_BYTES, default_bytes(device_bytes(DEVICE)))
PRODUCTS = 20


def milliseconds(call: Callable[[], object], repetitions: int = 7) -> float:
    """Median time between two events of the device around `call`, after a first call that does not count."""
    call()
    times = []
    for _ in range(repetitions):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times)


def bare_milliseconds_per_pair() -> float:
    """Time of a (row, pool) pair in fp32 products of the shape of a tile, one after the other."""
    tile = tile_for(DEVICE, HEADS)
    rows, keys = (torch.randn(count, DIM, device=DEVICE) for count in (tile.rows * HEADS, tile.pools))
    scores = torch.empty(len(rows), len(keys), device=DEVICE)

    def products() -> None:
        for _ in range(PRODUCTS):
            torch.mm(rows, keys.T, out=scores)

    return milliseconds(products) / (PRODUCTS * tile.rows * tile.pools)


def selection() -> None:
    """(a) of `make bench` on this device, and the memory that a call takes."""
    for tokens in TOKENS:
        inputs = moved(Inputs.of(tokens))
        select = partial(select_pools, inputs.q, inputs.weights, inputs.pool_key, inputs.layout, budget=BUDGET)
        before = bare_milliseconds_per_pair()
        took = milliseconds(partial(select, score_bytes=DEFAULT_BYTES))
        bare = (before + bare_milliseconds_per_pair()) / 2 * inputs.work.scored_pairs
        peak, selected = requested_at_peak(partial(select, score_bytes=DEFAULT_BYTES))
        memory = (peak - selected.nbytes) / DEFAULT_BYTES
        print(f"selection of {tokens:,} tokens over the bare fp32 products of its scored pairs: {took / bare:.2f}")
        print(f"  its peak memory less its output, over score_bytes: {memory:.2f}  ({took:.1f} ms)")


def attention() -> None:
    """Backward over forward, and whether chunks of another length happen to give the same bits: nothing promises it."""
    case = glm_case(400)
    forward, both = milliseconds(case.out), milliseconds(case.run)
    print(f"attention of 400 rows, backward over forward: {both / forward - 1:.2f}  ({forward:.1f} ms forward)")
    runs = [case.run(attend_bytes=size << 20) for size in (32, 256, 1024)]
    same = [all(torch.equal(run[part], runs[0][part]) for run in runs) for part in range(3)]
    print(f"  the same bits under 32 MiB, 256 MiB and 1 GiB: output {same[0]}, dq {same[1]}, dkv {same[2]}")


def kernels() -> None:
    """The Triton backend's selection over torch's, and its share of what bf16 products reach here."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * 8192**3 / milliseconds(partial(torch.mm, a, b))
    for tokens in TOKENS:
        inputs = moved(Inputs.of(tokens))
        data = inputs.q.bfloat16(), inputs.weights, inputs.pool_key.bfloat16(), inputs.layout
        bounds = inputs.layout.bounds(torch.arange(tokens, device=DEVICE))
        for score_bytes in BUDGETS:
            took = {}
            for backend in (TorchBackend(), TritonBackend()):
                counters = SelectionCounters()
                options = {"budget": BUDGET, "score_bytes": score_bytes, "use_relu": True, "counters": counters}
                took[backend.name] = milliseconds(partial(backend.select, *data, bounds, **options), 3)
            share = 2 * HEADS * DIM * inputs.work.scored_pairs / took["triton"] / peak
            ratio, under = took["triton"] / took["torch"], bytes_text(score_bytes)
            print(f"selection of {tokens:,} tokens under {under}, Triton over torch: {ratio:.4f}")
            print(f"  over measured bf16 products, {peak / 1e9:.0f} TFLOP/s: {share:.2f}  ({took['triton']:.2f} ms)")


if __name__ == "__main__":
    print(f"{torch.cuda.get_device_name(DEVICE)}, torch {torch.__version__}, {HEADS} heads x {DIM}, budget {BUDGET}")
    selection()
    attention()
    if refused := triton_refusal(Target.of(DEVICE, torch.bfloat16, heads=HEADS, dim=DIM)):
        print(f"no Triton kernels: {refused}")
    else:
        kernels()
