"""Ranks of the training job with all that stands beside them, started as torchrun starts them but for the launcher."""

import contextlib
import gc
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch.distributed as dist
from harness import forked
from train_runs import FLAG, ROOT, TINY

# A rank that ends later than this has hung.
LIMIT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended.

    Attributes:
        statuses: of each rank, negative where a signal ended it, None where it was never started or had to be killed.
        stderr: of each rank.
    """

    statuses: list[int | None]
    stderr: list[str]

    def last_word(self) -> str:
        """The lines that begin as an error does, which one rank prints, as the last ones."""
        said = [text for text in self.stderr if "mcore_dsa.train: error:" in text]
        assert len(said) == 1, self.stderr
        lines = said[0].rstrip("\n").split("\n")
        first = min(number for number, line in enumerate(lines) if line.startswith("mcore_dsa.train: error:"))
        assert all(line.startswith("mcore_dsa.train: error: ") for line in lines[first:]), said[0]
        return "\n".join(line.removeprefix("mcore_dsa.train: error: ") for line in lines[first:])


def attended(
    run_dir: Path,
    ranks: int,
    *options: str,
    fault: Callable[[], None] | None = None,
    of_rank: int | None = None,
    absent: Collection[int] = (),
    flags: Callable[[int], str] = lambda rank: "1",
    torchrun: bool = True,
) -> Ended:
    """Run the job's `main` in ranks that share one store, and see how each of them ends.

    Args:
        fault: called before `main`, in rank `of_rank` or in all.
        absent: ranks that are never started.
        flags: the value of the flag of a rank.
        torchrun: whether a launcher keeps the store; rank 0 does without one.
    """
    arguments, folder = _arguments(run_dir, options), _said(run_dir)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not torchrun:
        del store
    started: dict[int, BaseProcess] = {}
    context = forked()
    for rank in set(range(ranks)) - set(absent):
        own = fault if of_rank in (None, rank) else None
        environment = {**_environment(rank, ranks, port, torchrun=torchrun), FLAG: flags(rank)}
        started[rank] = context.Process(target=_rank, args=(environment, arguments, folder / str(rank), own))
        started[rank].start()
    statuses = _wait(started, until=time.monotonic() + LIMIT_S)
    said = [(folder / str(rank)).read_text() if rank in started else "" for rank in range(ranks)]
    return Ended(statuses=[statuses.get(rank) for rank in range(ranks)], stderr=said)


def killed_with_launcher(run_dir: Path, ranks: int, *options: str, step: int) -> list[int]:
    """Run the job in ranks of which the last kills the launcher of all in the middle of a step.

    Returns: their process ids.
    """
    folder = _said(run_dir)
    launcher = forked().Process(target=_launch, args=(ranks, _arguments(run_dir, options), folder, step))
    launcher.start()
    launcher.join(LIMIT_S)
    assert launcher.exitcode == -signal.SIGKILL
    return [int((folder / f"{rank}.pid").read_text()) for rank in range(ranks)]


def _launch(ranks: int, arguments: list[str], folder: Path, step: int) -> None:
    def kill() -> None:
        os.kill(os.getppid(), signal.SIGKILL)

    ports = []
    for rank in range(ranks):
        port, write = os.pipe()
        ports.append(write)
        if os.fork() == 0:
            (folder / f"{rank}.pid").write_text(str(os.getpid()))
            environment = {**_environment(rank, ranks, int(os.read(port, 9))), FLAG: "1"}
            try:
                _rank(environment, arguments, folder / str(rank), partial(in_step, step, kill) if rank else None)
            finally:
                os._exit(1)
    # After the forks, so that nobody else holds it.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for write in ports:
        os.write(write, str(store.port).encode())
    for _ in range(ranks):
        os.wait()


def _arguments(run_dir: Path, options: Sequence[str]) -> list[str]:
    words = ["train", "--config", str(ROOT / "configs/tiny_tp2.yaml"), *TINY, "--run_dir", str(run_dir)]
    return words + shlex.split(" ".join(options))


def _said(run_dir: Path) -> Path:
    folder = run_dir.with_name(f"{run_dir.name}.said")
    folder.mkdir(exist_ok=True)
    return folder


def _environment(rank: int, ranks: int, port: int, *, torchrun: bool = True) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        **({"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"} if torchrun else {}),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }


def _wait(started: dict[int, BaseProcess], *, until: float) -> dict[int, int | None]:
    """What the ranks end with; as torchrun does, those that are stopped are killed when the others have ended."""
    for process in started.values():
        while process.is_alive() and not _is_stopped(process.pid) and time.monotonic() < until:
            process.join(0.05)
    statuses = {rank: process.exitcode for rank, process in started.items()}
    for process in started.values():
        process.kill()
        process.join()
    return statuses


def _is_stopped(pid: int | None) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _rank(environment: dict[str, str], arguments: list[str], said: Path, fault: Callable[[], None] | None) -> None:
    os.environ.update(environment)
    stream = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = arguments
    from mcore_dsa.train.__main__ import main

    if fault is not None:
        fault()
    sys.exit(main())


def in_step(step: int, what: Callable[[], None]) -> None:
    """Do something in the middle of a step of this rank, between its backward and its update."""
    from mcore_dsa.train import loop

    advance = loop.OptimizerParamScheduler.step

    def then(self: loop.OptimizerParamScheduler, increment: int) -> None:
        # It is built with a step of 0.
        if increment and self.num_steps + 1 == step:
            what()
        advance(self, increment)

    loop.OptimizerParamScheduler.step = then


def raises() -> None:
    raise RuntimeError("a bit has flipped")


def hangs() -> None:
    time.sleep(LIMIT_S)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_killed_in_the_save() -> None:
    """When its file is written, and not yet on disk."""
    os.fsync = lambda descriptor: is_killed()  # type: ignore[assignment]


def is_asked_to_stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def is_interrupted() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def is_told_to_end_at_once() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    hangs()


def writes_to_a_weight() -> None:
    """Where no version counter sees it."""
    from mcore_dsa.megatron import KPoolDSAIndexer

    (indexer, *_) = (found for found in gc.get_objects() if isinstance(found, KPoolDSAIndexer))
    indexer.linear_wq_b.weight.data.view(-1)[5] += 1
