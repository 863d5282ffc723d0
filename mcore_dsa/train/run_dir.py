"""The folder of a run: one job owns it, and an earlier run is set aside before another begins in it.

A job holds a lock on the file `lock` in its folder: the operating system gives it up when the last rank has ended,
however it ended. Rank 0 takes it alone and shares it with the job's other ranks, so that a rank that lives on by itself
keeps the folder closed too.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import torch.distributed as dist

from mcore_dsa.train.together import of_every_rank, told_to_every_rank

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_LOCK = "lock"
# What a file system says that keeps no locks.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}

_logger = logging.getLogger(__name__)


class RunDir:
    """A run's folder, owned by this job; see `owned`.

    Attributes:
        path: where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    def take(self) -> None:
        """Make the folder where it is not there, and own it; every rank has to call this.

        Raises: ValueError on every rank where another job owns it, it holds something else than a run, or it cannot be
            made or written to.
        """
        what = f"run_dir is {str(self.path)!r}; accepted is a folder that every rank can write to"
        with told_to_every_rank(what):
            if dist.get_rank() == 0:
                refuse_something_else(self.path)
                self.path.mkdir(parents=True, exist_ok=True)
                self._hold(alone=True)
        with told_to_every_rank(what):
            if dist.get_rank() != 0:
                self._hold(alone=False)

    def begin_anew(self) -> None:
        """Set an earlier run in the folder aside, under a numbered name; every rank has to call this.

        Raises: ValueError on every rank where that cannot be done; the earlier run is where it was, or aside.
        """
        moved = False
        with told_to_every_rank(f"run_dir is {str(self.path)!r}; accepted is a folder that can be renamed"):
            if dist.get_rank() == 0 and is_run(self.path):
                _logger.info("an earlier run is now in %s", set_aside(self.path))
                moved = True
        if any(of_every_rank(moved)):
            # The lock that this job holds went with the earlier run.
            self.take()

    def check(self) -> None:
        """Make sure that the folder is still there and this job's; every rank has to call this.

        Raises: ValueError on every rank where it is not.
        """
        with told_to_every_rank(f"run_dir is {str(self.path)!r}; accepted is where it was when this job began"):
            if dist.get_rank() == 0 and self._lock is not None and not self._holds_what_is_there(self._lock):
                raise ValueError(
                    f"run_dir is {str(self.path)!r}, moved or removed while its job ran; accepted is neither"
                )

    def release(self) -> None:
        """Give the folder up, and remove it on rank 0 if nothing has come into it."""
        if self._lock is None:
            return
        if dist.get_rank() == 0 and self._holds_what_is_there(self._lock):
            with suppress(OSError):
                if os.listdir(self.path) == [_LOCK]:
                    (self.path / _LOCK).unlink()
                    self.path.rmdir()
        os.close(self._lock)
        self._lock = None

    def _hold(self, *, alone: bool) -> None:
        path = self.path / _LOCK
        # Rank 0 makes the file; a rank that does not find it has no file system in common with rank 0.
        lock = os.open(path, os.O_RDWR | (os.O_CREAT if alone else 0), 0o666)
        try:
            fcntl.flock(lock, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            if alone:
                now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
                os.ftruncate(lock, 0)
                os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()} since {now}\n".encode(), 0)
                # Not in one step: another job that comes between the two has the folder, and this one is refused.
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(lock)
            raise ValueError(
                f"run_dir is {str(self.path)!r}, which {_owner(path)} owns; accepted is the folder of no running job"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(lock)
                raise
            _logger.warning("%s is on a file system without locks (%s): a second job in it is not refused", path, error)
        if not self._holds_what_is_there(lock):
            os.close(lock)
            raise ValueError(
                f"run_dir is {str(self.path)!r}, which another job is just leaving; accepted is to try again"
            )
        if self._lock is not None:
            os.close(self._lock)
        self._lock = lock

    def _holds_what_is_there(self, lock: int) -> bool:
        try:
            return os.path.samestat(os.fstat(lock), os.stat(self.path / _LOCK))
        except OSError:
            return False


@contextmanager
def owned(path: Path) -> Iterator[RunDir]:
    """The folder of a run, owned by this job as long as the context lasts; every rank has to enter it.

    Raises: as `RunDir.take`.
    """
    run_dir = RunDir(path)
    try:
        run_dir.take()
        yield run_dir
    finally:
        run_dir.release()


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return (path / METRICS).exists() or any((path / CHECKPOINTS).glob("step_*"))


def refuse_something_else(path: Path) -> None:
    """Make sure that a run can go to a folder, as far as that can be seen without writing to it.

    Raises: ValueError for one that holds something else than a run, or cannot be read.
    """
    try:
        names = set(os.listdir(path))
    except FileNotFoundError:
        if not path.is_symlink():
            return
        reason = "it is a link to nothing"
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    else:
        if is_run(path) or names <= {_LOCK}:
            return
        raise ValueError(
            f"run_dir is {str(path)!r}, which holds something else; accepted is a new or empty folder, or a run's"
        )
    raise ValueError(f"run_dir is {str(path)!r}; accepted is a folder: {reason}")


def set_aside(path: Path) -> Path:
    """Rename a file or folder to the first numbered name that is free, which is returned.

    Raises: OSError where it cannot be renamed.
    """
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.{number}")):
        number += 1
    path.rename(aside)
    return aside


def _owner(lock: Path) -> str:
    """Who says to own a lock, as far as that can be read."""
    try:
        with lock.open("rb") as stream:
            return stream.read(200).decode(errors="replace").strip() or "another job"
    except OSError:
        return "another job"
