"""A run's folder has one owner, and what cannot be one is refused in a line, on every rank."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import RanksFailed, run_ranks

SPREADS = [2, 4]


def refusal(path: Path) -> str:
    """Own a folder; what all ranks were told, for they must be told the same."""
    from mcore_dsa.train.run_dir import owned
    from mcore_dsa.train.together import of_every_rank

    told = ""
    try:
        with owned(path):
            pass
    except ValueError as error:
        told = str(error)
    assert set(of_every_rank(told)) == {told}
    return told


def refusals(paths: list[Path]) -> list[str]:
    return [refusal(path) for path in paths]


@pytest.mark.parametrize("ranks", SPREADS)
def test_what_cannot_be_a_run_s_folder_is_refused_in_a_line(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    (tmp_path / "strange").mkdir()
    (tmp_path / "strange" / "thesis.tex").touch()
    (tmp_path / "locked").mkdir()
    (tmp_path / "locked" / "lock").mkdir()
    before = sorted(tmp_path.rglob("*"))
    accepted = {
        tmp_path / "dangling": "a folder: it is a link to nothing",
        tmp_path / "file": "a folder: Not a directory",
        tmp_path / "strange": "a new or empty folder, or a run's",
        tmp_path / "locked": f"a folder that every rank can write to: Is a directory: {tmp_path}/locked/lock",
        tmp_path / ("long" * 100): "a folder: File name too long",
        tmp_path / "file" / "below": "a folder: Not a directory",
        # Nobody can make a folder there, root neither.
        Path("/proc/run"): "a folder that every rank can write to: No such file or directory: /proc/run",
    }
    told = run_ranks(refusals, ranks, list(accepted))[0]
    for path, line in zip(accepted, told, strict=True):
        assert line.startswith(f"run_dir is {str(path)!r}")
        assert line.endswith(f"; accepted is {accepted[path]}")
    assert sorted(tmp_path.rglob("*")) == before


def two_jobs(path: Path) -> dict[str, Any]:
    """A second job beside this one, and what the first does to its folder."""
    from mcore_dsa.train.run_dir import RunDir
    from mcore_dsa.train.together import of_every_rank

    def told(step: Any) -> str:
        try:
            step()
        except ValueError as error:
            return str(error)
        return ""

    first, second = RunDir(path), RunDir(path)
    first.take()
    pid = of_every_rank(os.getpid())[0]
    seen: dict[str, Any] = {"pid": pid, "beside": told(second.take)}
    first.begin_anew()
    seen["new"] = of_every_rank(sorted(os.listdir(path.parent)))[0]
    if dist.get_rank() == 0:
        (path / "metrics.jsonl").write_text("first")
    first.begin_anew()
    seen["aside"] = of_every_rank(sorted(os.listdir(path.parent)))[0]
    seen["beside the new one"] = told(second.take)
    first.check()
    if dist.get_rank() == 0:
        path.rename(path.with_name("elsewhere"))
    seen["moved"] = told(first.check)
    second.take()
    seen["beside what was moved"] = told(first.take)
    second.release()
    dist.barrier()
    seen["left"] = path.exists()
    first.release()
    return seen


@pytest.mark.parametrize("ranks", SPREADS)
def test_one_job_owns_a_folder(ranks: int, tmp_path: Path) -> None:
    path = tmp_path / "runs" / "run"
    all_seen = run_ranks(two_jobs, ranks, path)
    assert all(seen == all_seen[0] for seen in all_seen)
    seen = all_seen[0]
    owned = f"run_dir is {str(path)!r}, which process {seen['pid']} on {os.uname().nodename} since "
    for moment in ("beside", "beside the new one", "beside what was moved"):
        assert seen[moment].startswith(owned)
        assert seen[moment].endswith(" UTC owns; accepted is the folder of no running job")
    assert seen["new"] == ["run"]
    assert seen["aside"] == ["run", "run.1"]
    assert seen["moved"] == f"run_dir is {str(path)!r}, moved or removed while its job ran; accepted is neither"
    assert seen["left"] is False
    assert (path.with_name("run.1") / "metrics.jsonl").read_text() == "first"


def take_and_be_killed(path: Path) -> None:
    from mcore_dsa.train.run_dir import RunDir

    run_dir = RunDir(path)
    run_dir.take()
    if dist.get_rank() == 0:
        (path / "metrics.jsonl").touch()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_lock_dies_with_its_holder(tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="SIGKILL"):
        run_ranks(take_and_be_killed, 2, tmp_path / "run")
    assert (tmp_path / "run" / "lock").exists()
    assert run_ranks(refusal, 2, tmp_path / "run") == ["", ""]


def take_where_one_rank_is_elsewhere(paths: list[Path]) -> str:
    """Each rank has a disk of its own."""
    from mcore_dsa.train.run_dir import RunDir

    run_dir = RunDir(paths[dist.get_rank()])
    try:
        run_dir.take()
    except ValueError as error:
        return str(error)
    finally:
        run_dir.release()
    return ""


def test_ranks_that_share_no_disk_are_refused(tmp_path: Path) -> None:
    told = run_ranks(take_where_one_rank_is_elsewhere, 2, [tmp_path / "here", tmp_path / "there"])
    assert set(told) == {
        f"run_dir is {str(tmp_path / 'there')!r}; accepted is a folder that every rank can write to: "
        f"No such file or directory: {tmp_path / 'there' / 'lock'} (rank 1)"
    }
