"""The launcher: signals that go to the ranks, ranks that go with it, and the status that comes of theirs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from mcore_dsa.train.launch import status_of

# Each rank writes its number to a file when it is ready, and ends, when asked, as a training job does.
RANK = """
import ctypes, os, sys, time
from pathlib import Path
from mcore_dsa.train.ending import Status, StopRequest, die_with_launcher
stop = StopRequest()
stop.install()
die_with_launcher(os.getppid())
Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
if sys.argv[2] == "deaf":
    # In a call that no signal interrupts, as a collective is: a mutex locked twice.
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
while not stop():
    time.sleep(0.05)
# As long as a step and a checkpoint.
time.sleep(0.5)
print("stopped", file=sys.stderr)
sys.exit(Status.STOPPED)
"""


def launched(folder: Path, *arguments: str, ranks: int = 2) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher of ranks that are ready, and their process ids."""
    (folder / "rank.py").write_text(RANK)
    options = ["--standalone", "--nproc-per-node", str(ranks), str(folder / "rank.py"), str(folder), *arguments]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "mcore_dsa.train.launch", *options],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        # A shell's background jobs, and what they start, ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return launcher, process_ids(launcher, [folder / str(rank) for rank in range(ranks)])


def process_ids(parent: subprocess.Popen[str], files: Sequence[Path]) -> list[int]:
    """What ranks write when they are ready."""
    until = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in files):
        assert parent.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    return [int(path.read_text()) for path in files]


def assert_gone(processes: Sequence[int]) -> None:
    until = time.monotonic() + 20
    for process in processes:
        while (stat := Path(f"/proc/{process}/stat")).exists() and " Z " not in stat.read_text():
            assert time.monotonic() < until
            time.sleep(0.05)


@pytest.mark.parametrize(("number", "count"), [(signal.SIGINT, 2), (signal.SIGTERM, 4)])
def test_a_signal_goes_to_the_ranks_and_their_status_comes_back(number: int, count: int, tmp_path: Path) -> None:
    """Also where who stops the job tells its processes, all of them but rank 0, and the launcher twice."""
    launcher, ranks = launched(tmp_path, "obedient", ranks=count)
    for process in [launcher.pid, *ranks[1:], *([launcher.pid] if number == signal.SIGTERM else [])]:
        os.kill(process, number)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 75
    # The ranks' words are the last ones: no traceback of the launcher's own.
    assert said.splitlines()[-count:] == ["stopped"] * count
    assert_gone(ranks)


def test_a_second_signal_kills_the_ranks(tmp_path: Path) -> None:
    launcher, ranks = launched(tmp_path, "deaf")
    launcher.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        launcher.wait(0.5)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 128 + signal.SIGINT
    assert said == "mcore_dsa.train: error: ended at once by a second SIGINT; what no checkpoint has is lost\n"
    assert_gone(ranks)


def test_a_launcher_that_is_killed_takes_its_ranks_with_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    launch = "import subprocess, sys; subprocess.run([sys.executable, *sys.argv[1:]])"
    command = [sys.executable, "-c", launch, tmp_path / "rank.py", tmp_path, "deaf"]
    launcher = subprocess.Popen(command, env={**os.environ, "RANK": "0"}, text=True)
    (rank,) = process_ids(launcher, [tmp_path / "0"])
    launcher.kill()
    launcher.wait()
    assert_gone([rank])


def test_a_rank_whose_launcher_is_gone_already_ends() -> None:
    late = "import os; from mcore_dsa.train.ending import die_with_launcher; die_with_launcher(os.getppid() + 1)"
    assert subprocess.run([sys.executable, "-c", late]).returncode == -signal.SIGKILL


def test_a_second_signal_ends_a_rank_that_does_not_come_out_of_a_call(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    rank = subprocess.Popen(
        [sys.executable, tmp_path / "rank.py", tmp_path, "deaf"], env={**os.environ, "RANK": "0"}, text=True
    )
    process_ids(rank, [tmp_path / "0"])
    rank.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(0.3)
    rank.send_signal(signal.SIGTERM)
    assert rank.wait(20) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("codes", "status"),
    [
        ([], 0),
        ([0, 0], 0),
        ([75, 75], 75),
        ([2, 2, -15], 2),
        ([75, 1, -9], 1),
        ([1, 2], 1),
        ([-9, -15], 143),
        ([-9], 137),
    ],
)
def test_the_status_is_the_ranks(codes: list[int], status: int) -> None:
    assert status_of(codes) == status
