"""What the drift watch costs a layer: a step that compares against one that does not, side by side on one rank.

`python -m benchmarks.watch`. A step is forward and backward of `KPoolDSAttention` with index heads and latents of
GLM-5.3-Flash's size; one in `MCORE_DSA_DRIFT_EVERY` of them compares. CPU seconds, medians of ratios; operators and
bytes are counted, and do not depend on the machine.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from benchmarks.launches import counted, inputs, layer
from mcore_dsa import patches
from mcore_dsa.settings import DEFAULT_DRIFT_EVERY, DRIFT_VARIABLE


def step_of(every: str, tokens: int) -> Callable[[], None]:
    os.environ[DRIFT_VARIABLE] = every
    module, (named, grad) = layer(1), inputs(tokens, 0)

    def step() -> None:
        module(**named).backward(grad)

    step()
    return step


def seconds(step: Callable[[], None]) -> float:
    started = time.process_time()
    step()
    return time.process_time() - started


def measure(tokens: int, repetitions: int) -> None:
    steps = [step_of(every, tokens) for every in ("1", "0")]
    ratios = [seconds(steps[0]) / seconds(steps[1]) for _ in range(repetitions)]
    more = median(ratios) - 1
    print(f"{tokens} tokens: a step that compares / one that does not: {1 + more:.4f}", end=" ")
    print(f"({min(ratios):.4f} ... {max(ratios):.4f}); at the default {more / DEFAULT_DRIFT_EVERY:.4%} of a step")
    compares, plain = (counted(step)[0] for step in steps)
    for column in ("operators", "launches", "waits", "collectives"):
        with_watch, without = (getattr(counts, column).total() for counts in (compares, plain))
        print(f"{column}: {with_watch - without} more than {without}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watch", description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    patches.apply()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store"), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        measure(arguments.tokens, arguments.repetitions)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
