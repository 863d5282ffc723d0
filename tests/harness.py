"""Run one function on several ranks, each a fresh process, and bring back what every rank returned or raised.

The processes are forked from a server that has imported `preloaded.py` already: a second two-rank run takes about
0.1 s, 0.3 s with Megatron's groups, where fresh interpreters take 6 s. Each process that calls this (each pytest-xdist
worker too) has one such server of about 740 MB, shared with its ranks by copy-on-write.
"""

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

PRELOAD = "preloaded"
# No compilation and one thread, or a rank takes long to start; no devices, for CUDA does not survive a fork.
SERVER_ENV = {
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    # The server ignores sys.path, and skips in silence what it cannot import (Python 3.12).
    "PYTHONPATH": str(Path(__file__).parent),
}
# Seconds that the other ranks get to fail on their own, so that their tracebacks come too, before they are ended.
GRACE_S = 3.0

Env = Mapping[str, str | None]


class RanksFailed(AssertionError):
    """Some rank raised, died or hung; the message holds the tracebacks in the order in which they came."""


@dataclass(frozen=True)
class _Job:
    """What the ranks of one run have in common."""

    # A pickle, so that a process sees what the server imported before it imports anything for the function.
    call: bytes
    world_size: int
    backend: Literal["gloo", "nccl"]
    device: Literal["cpu", "cuda"]
    timeout: float
    folder: Path

    def stack_file(self, rank: int) -> Path:
        return self.folder / f"stack{rank}"


@dataclass(frozen=True)
class _Report:
    """How a rank ended: when (monotonic seconds), whether the function returned, and its value or the traceback."""

    at: float
    succeeded: bool
    value: Any


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    pipe: connection.Connection
    report: _Report | None = None


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    env: Env | Sequence[Env] | None = None,
    backend: Literal["gloo", "nccl"] = "gloo",
    device: Literal["cpu", "cuda"] = "cpu",
) -> list[Any]:
    """``fn(*args)`` on every rank of a new process group; the values in the order of ranks, their tensors on the CPU.

    ``fn`` is a top-level function of an importable module, whose own imports every rank pays for. ``env`` is set (None
    unsets) before it runs: one mapping for all ranks, or a sequence with one for each. ``device="cpu"`` hides CUDA
    devices from the ranks; ``"cuda"`` makes device ``rank % devices`` current, and starts new interpreters: CUDA does
    not survive a fork.

    Raises:
        RanksFailed: a rank raised or died, or did not end within ``timeout`` seconds; all that still run are killed.
        ValueError: ``env`` has another number of entries than ranks, or NCCL would have to share a device.
    """
    envs = [env] * world_size if env is None or isinstance(env, Mapping) else list(env)
    if len(envs) != world_size:
        raise ValueError(
            f"env has {len(envs)} entries: accepted are one mapping, or one for each of {world_size} ranks"
        )
    if backend == "nccl" and (device != "cuda" or torch.cuda.device_count() < world_size):
        raise ValueError(
            f"backend='nccl' needs device='cuda' and {world_size} devices; there are {torch.cuda.device_count()}"
        )
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(pickle.dumps((fn, args)), world_size, backend, device, timeout, Path(folder))
        ranks: list[_Rank] = []
        try:
            for number in range(world_size):
                ranks.append(_start(number, job, envs[number] or {}))
            _collect(ranks, timeout)
        finally:
            _end(ranks)
        if not all(rank.report is not None and rank.report.succeeded for rank in ranks):
            raise RanksFailed(_describe(ranks, job))
    return [rank.report.value for rank in ranks if rank.report is not None]


def megatron_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    vp: int | None = None,
    ep: int = 1,
    seed: int = 1234,
    without_patches: Collection[str] = (),
    **options: Any,
) -> list[Any]:
    """:func:`run_ranks` with the patches applied, Megatron's process groups made and its random states seeded.

    The data-parallel size is what ``world_size`` leaves. ``without_patches`` names patches to leave out, to show what
    they are for. ``options`` are those of :func:`run_ranks`.
    """
    sizes = {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": cp,
        "virtual_pipeline_model_parallel_size": vp,
        "expert_model_parallel_size": ep,
    }
    return run_ranks(_in_megatron, world_size, fn, args, sizes, seed, frozenset(without_patches), **options)


def _in_megatron(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    sizes: Mapping[str, int | None],
    seed: int,
    without_patches: frozenset[str],
) -> Any:
    import mcore_dsa.patches as patches

    if without_patches:
        patches.apply_patches([patch for patch in patches.PATCHES if patch.name not in without_patches])
    else:
        patches.apply()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(**sizes)
    try:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        return fn(*args)
    finally:
        parallel_state.destroy_model_parallel()


def forked() -> ForkServerContext:
    """The context whose processes are forked from the server that has imported `preloaded.py`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOAD])
    with _environment(SERVER_ENV):
        forkserver.ensure_running()
    return context


def _start(number: int, job: _Job, env: Env) -> _Rank:
    context = forked() if job.device == "cpu" else multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_rank_main, args=(number, job, dict(env), theirs))
    process.start()
    theirs.close()
    return _Rank(number, process, ours)


@contextlib.contextmanager
def _environment(changes: Env) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(changes: Env) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _rank_main(number: int, job: _Job, env: Env, pipe: connection.Connection) -> None:
    _set_environment(env)
    with job.stack_file(number).open("w") as stack:
        # Written by a thread that needs no interpreter lock, so that a rank stuck inside a collective shows where.
        faulthandler.dump_traceback_later(job.timeout * 0.9, file=stack)
        try:
            if job.device == "cpu" and PRELOAD not in sys.modules:
                raise ImportError(
                    f"the fork server could not import {PRELOAD}; is mcore_dsa with its extra dev installed?"
                )
            report = _Report(time.monotonic(), True, _run(number, job))
        except BaseException:
            report = _Report(time.monotonic(), False, traceback.format_exc())
        try:
            # Before the group is destroyed: that breaks the others' collectives, and their reports would come first.
            pipe.send_bytes(_packed(report))
            if report.succeeded:
                # The others may still be connecting to this rank: it stays until all have reported.
                _wait_until_closed(pipe)
        finally:
            faulthandler.cancel_dump_traceback_later()
            # A process that keeps its group aborts at exit now and then ("terminate called without an exception").
            if dist.is_initialized():
                dist.destroy_process_group()


def _wait_until_closed(pipe: connection.Connection) -> None:
    with contextlib.suppress(EOFError, ConnectionError):
        pipe.recv_bytes()


def _packed(report: _Report) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(report, buffer)
    except Exception:
        buffer = io.BytesIO()
        torch.save(_Report(report.at, False, f"the value cannot be sent:\n{traceback.format_exc()}"), buffer)
    return buffer.getvalue()


def _run(number: int, job: _Job) -> Any:
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(number % torch.cuda.device_count())
    store = dist.FileStore(str(job.folder / "store"), job.world_size)
    wait = timedelta(seconds=job.timeout)
    dist.init_process_group(job.backend, store=store, rank=number, world_size=job.world_size, timeout=wait)
    fn, args = pickle.loads(job.call)
    return fn(*args)


def _collect(ranks: Sequence[_Rank], timeout: float) -> None:
    """Wait for the reports; once a rank has failed only ``GRACE_S`` longer, for the others may wait for it for ever."""
    deadline = time.monotonic() + timeout
    running = {rank.pipe: rank for rank in ranks}
    while running:
        ready = connection.wait(list(running), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for pipe in ready:
            rank = running.pop(cast(connection.Connection, pipe))
            rank.report = _received(rank)
            if not rank.report.succeeded:
                deadline = min(deadline, time.monotonic() + GRACE_S)


def _received(rank: _Rank) -> _Report:
    try:
        packed = rank.pipe.recv_bytes()
    except (EOFError, ConnectionError):
        rank.process.join()
        code = rank.process.exitcode or 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return _Report(time.monotonic(), False, f"the process ended without a report: {how}\n")
    report = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
    assert isinstance(report, _Report)
    return report


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        rank.pipe.close()
    for rank in ranks:
        if rank.report is not None:
            rank.process.join(GRACE_S)
        rank.process.kill()
        rank.process.join()


def _describe(ranks: Sequence[_Rank], job: _Job) -> str:
    failed = [rank for rank in ranks if rank.report is not None and not rank.report.succeeded]
    failed.sort(key=lambda rank: rank.report.at if rank.report else 0.0)
    running = [rank.number for rank in ranks if rank.report is None]
    lines = [f"of {job.world_size} ranks"]
    lines += [f"rank {rank.number} failed:\n{rank.report.value}" for rank in failed if rank.report]
    if failed and running:
        lines.append(f"ranks {running} still ran {GRACE_S:g} s later and were killed")
    elif running:
        lines.append(f"ranks {running} hung: killed after {job.timeout:g} s, when they were at")
        lines += [f"rank {number}:\n{job.stack_file(number).read_text()}" for number in running]
    return "\n".join(lines)
