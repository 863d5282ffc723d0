"""Checkpoints are whole or named: every damage is refused in a line, and the newest older whole one is offered."""

import filecmp
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from harness import run_ranks
from test_train import assert_equal_runs
from train_runs import FLAG, losses, refusals, start, tiny

from mcore_dsa.files import DIGESTS, digest_of, names_in, write_digests

# One layout of two ranks, one of four; three steps, a checkpoint after each.
SPREADS = {2: "", 4: "--parallel.tensor 2 --training.micro_batch_size 1"}
EVERY = "--checkpoint.save_every 1 --training.steps 3"


@pytest.fixture(scope="module", params=SPREADS, ids=lambda ranks: f"{ranks} ranks")
def straight(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A run of some number of ranks, and where it is."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    start(tiny(run_dir, SPREADS[request.param], EVERY), request.param)
    return request.param, run_dir


def folder(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:08d}"


def flip(file: Path, at: float) -> None:
    content = bytearray(file.read_bytes())
    content[int(at * len(content))] ^= 1
    file.write_bytes(content)


def replace(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    return file


def edit_step(run_dir: Path) -> Path:
    file = folder(run_dir, 3) / "job.json"
    return replace(file, json.dumps({**json.loads(file.read_text()), "step": 2}).encode())


def exchange(run_dir: Path, names: str) -> Path:
    for file in folder(run_dir, 2).glob(names):
        shutil.copyfile(file, folder(run_dir, 3) / file.name)
    return folder(run_dir, 3) / "job.json" if names == "*" else next(folder(run_dir, 3).glob(names))


def link_out(run_dir: Path) -> Path:
    outside = run_dir.parent / f"{run_dir.name} outside"
    folder(run_dir, 3).rename(outside)
    folder(run_dir, 3).symlink_to(outside)
    return folder(run_dir, 3)


def damage_file(name: str, how: str) -> Callable[[Path], Path]:
    def damage(run_dir: Path) -> Path:
        file = folder(run_dir, 3) / name
        if how == "missing":
            file.unlink()
        elif how == "empty":
            file.write_bytes(b"")
        elif how == "truncated":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        elif how == "a folder":
            file.unlink()
            file.mkdir()
        else:
            flip(file, float(how))
        return file

    return damage


def damage_latest(content: bytes | None) -> Callable[[Path], Path]:
    def damage(run_dir: Path) -> Path:
        file = run_dir / "checkpoints" / "latest"
        if content is None:
            file.unlink()
            return file
        return replace(file, content)

    return damage


# Each damages a copy of the run, and gives the file that is to be named.
DAMAGES: dict[str, Callable[[Path], Path]] = {
    **{
        f"{name} {how}": damage_file(name, how)
        for name in ("__0_0.distcp", ".metadata", "metadata.json", "job.json", DIGESTS)
        for how in ("missing", "empty", "truncated", "a folder", "0.5")
    },
    **{f"__1_0.distcp {how}": damage_file("__1_0.distcp", how) for how in ("missing", "0.1", "0.5", "0.7")},
    "a foreign file": lambda run_dir: replace(folder(run_dir, 3) / "__9_0.distcp", b"x"),
    "an edited step": edit_step,
    "one rank's file of another step": lambda run_dir: exchange(run_dir, "__1_0.distcp"),
    "digests of another step": lambda run_dir: exchange(run_dir, DIGESTS),
    "all of another step": lambda run_dir: exchange(run_dir, "*"),
    "a link out of the run": link_out,
    "latest missing": damage_latest(None),
    "latest empty": damage_latest(b""),
    "latest of nothing": damage_latest(b"step_00000009"),
    "latest out of the run": damage_latest(b"../../other/checkpoints/step_00000003"),
    "latest absolute": damage_latest(b"/etc"),
    "latest not text": damage_latest(b"\xff\xfe\x00step"),
    "latest long": damage_latest(b"step_" + b"0" * 10**6),
}


type Case = tuple[Path, bool | Literal["auto"], int | None]


def found(groups: list[list[Case]]) -> list[list[str | int | None]]:
    """What there is to continue from in each of some runs: the step, or why not; the same on all ranks."""
    from mcore_dsa.train.together import of_every_rank

    results = [[found_in(case) for case in cases] for cases in groups]
    assert all(of_rank == results for of_rank in of_every_rank(results))
    return results


def found_in(case: Case) -> str | int | None:
    from mcore_dsa.train.stored import find_start

    try:
        checkpoint = find_start(*case)
    except ValueError as error:
        return str(error)
    return None if checkpoint is None else checkpoint.step


def test_damage_is_named_with_the_newest_older_one_that_is_whole(straight: tuple[int, Path], tmp_path: Path) -> None:
    ranks, run_dir = straight
    named = []
    for number, damage in enumerate(DAMAGES.values()):
        shutil.copytree(run_dir, tmp_path / str(number))
        named.append(damage(tmp_path / str(number)))
    copies = [tmp_path / str(number) for number in range(len(DAMAGES))]
    # `latest` alone is damaged: the checkpoint of step 3 is whole.
    steps = [3 if name.startswith("latest") else 2 for name in DAMAGES]
    told, taken = run_ranks(found, ranks, [[(copy, how, None) for copy in copies] for how in (True, "auto")])[0]
    for name, line, file, step in zip(DAMAGES, told, named, steps, strict=True):
        assert isinstance(line, str), name
        # Of damaged digests it is a file that seems to be another.
        named_in_line = str(file) in line or (file.name == DIGESTS in line and str(file.parent) in line)
        assert named_in_line, line
        assert "\n" not in line
        assert line.endswith(f"; step_{step:08d} is whole: --resume-from {step}"), line
    assert taken == steps
    for copy in copies:
        files = [path.name for path in folder(run_dir, 2).iterdir()]
        assert filecmp.cmpfiles(folder(run_dir, 2), folder(copy, 2), files, shallow=False) == (files, [], [])


def test_where_nothing_is_whole(straight: tuple[int, Path], tmp_path: Path) -> None:
    ranks, run_dir = straight
    shutil.copytree(run_dir, tmp_path / "copy")
    for step in (1, 2, 3):
        flip(folder(tmp_path / "copy", step) / "__0_0.distcp", 0.5)
    cases = [(tmp_path / name, *how) for name in ("copy", "none") for how in ((True, None), ("auto", None), (True, 2))]
    unreadable = {"copy": (True, 7)}
    for name in ("unmounted", "a file", "files"):
        (tmp_path / name).mkdir()
        unreadable[name] = ("auto", None)
    (tmp_path / "unmounted" / "checkpoints").symlink_to("/nowhere")
    (tmp_path / "a file" / "checkpoints").touch()
    (tmp_path / "files" / "checkpoints").mkdir()
    folder(tmp_path / "files", 1).touch()
    cases += [(tmp_path / name, *how) for name, how in unreadable.items()]
    damaged, *rest, of_step_7, unmounted, a_file, files = run_ranks(found, ranks, [cases])[0][0]
    steps = f"; accepted are steps of checkpoints in {tmp_path / 'copy' / 'checkpoints'}: 1, 2, 3"
    assert of_step_7 == f"resume_from is 7{steps}"
    # Nothing starts anew in place of what may be there.
    told = {
        "unmounted": (unmounted, "a link to nothing, or to a volume that is not mounted"),
        "a file": (a_file, "Not a directory"),
        "files": (files, "Not a directory"),
    }
    for name, (line, why) in told.items():
        read = f"{tmp_path / name / 'checkpoints'} cannot be read; accepted is a folder that can, or none: {why}: "
        assert str(line).startswith(read)
    assert str(damaged).startswith(f"{folder(tmp_path / 'copy', 3) / '__0_0.distcp'} has SHA-256 ")
    assert str(damaged).endswith("; no earlier one is whole")
    auto, of_step_2, nothing, auto_of_nothing, step_2_of_nothing = rest
    assert str(of_step_2).startswith(f"{folder(tmp_path / 'copy', 2) / '__0_0.distcp'} has SHA-256 ")
    assert (auto, auto_of_nothing) == (None, None)
    assert (
        nothing
        == f"resume is true; accepted is false: {tmp_path / 'none' / 'checkpoints'} holds no complete checkpoint"
    )
    assert str(step_2_of_nothing).startswith("resume_from is 2; accepted are steps of checkpoints in ")


@pytest.mark.parametrize("straight", [2], indirect=True)
def test_files_of_another_step_are_refused(straight: tuple[int, Path], tmp_path: Path) -> None:
    """With a name, a step and digests that say otherwise."""
    ranks, run_dir = straight
    shutil.copytree(run_dir, tmp_path / "run")
    shutil.rmtree(folder(tmp_path / "run", 2))
    other = folder(tmp_path / "run", 3).rename(folder(tmp_path / "run", 2))
    job = replace(other / "job.json", json.dumps({**json.loads((other / "job.json").read_text()), "step": 2}).encode())
    write_digests(other, {name: digest_of(other / name) for name in names_in(other)})
    config = tiny(tmp_path / "run", SPREADS[ranks], EVERY, "--resume-from 2")
    told = run_ranks(refusals, ranks, [config], env={FLAG: "1"})
    assert told == [[f"{job} is of step 2; accepted is that of the schedule beside it, 3"]] * ranks


def test_the_older_one_continues_to_the_last_bit(straight: tuple[int, Path], tmp_path: Path) -> None:
    """Asked for, and found by an automatic restart, which a damaged log does not stop either."""
    ranks, run_dir = straight
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    flip(folder(copy, 3) / "__1_0.distcp", 0.5)
    damaged = digest_of(folder(copy, 3) / "__1_0.distcp")
    log = (copy / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    replace(
        copy / "metrics.jsonl",
        b"".join(
            [
                log[0],
                b"\xff\xfe\n",
                b'{"loss": 1}\n',
                b"[" * 9999 + b"\n",
                '{"step": 1}'.encode("utf-16-le") + b"\n",
                *log[1:],
            ]
        ),
    )
    resume = "--resume auto" if ranks == 4 else "--resume-from 2"
    summary = start(tiny(copy, SPREADS[ranks], EVERY, resume, "--checkpoint.keep 1"), ranks)
    assert summary["first_step"] == 3
    left = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert left == ["latest", "step_00000003", "step_00000003.1"]
    assert_equal_runs(run_dir, copy)
    aside = folder(copy, 3).with_name("step_00000003.1")
    assert digest_of(aside / "__1_0.distcp") == damaged
    assert (copy / "metrics.jsonl.1").read_bytes().count(b"\n") == 7
    assert len(losses(copy)) == 3


@pytest.mark.parametrize("straight", [2], indirect=True)
def test_an_automatic_restart_of_a_finished_run_does_nothing(straight: tuple[int, Path], tmp_path: Path) -> None:
    ranks, run_dir = straight
    copy = tmp_path / "run"
    shutil.copytree(run_dir, copy)
    summary = start(tiny(copy, SPREADS[ranks], EVERY, "--resume auto"), ranks)
    assert (summary["steps"], summary["first_step"], summary["last_loss"]) == (3, None, None)
    assert filecmp.dircmp(run_dir, copy).diff_files == ["lock"]


def prune_and_list(run_dir: Path) -> list[list[str]]:
    from mcore_dsa.train.stored import prune

    left = []
    for keep, spare in ((None, None), (2, None), (1, folder(run_dir, 2)), (1, None)):
        prune(run_dir, keep, spare)
        left.append(sorted(path.name for path in (run_dir / "checkpoints").glob("step_*")))
    return left


@pytest.mark.parametrize("straight", [2], indirect=True)
def test_old_checkpoints_are_removed_by_a_setting(straight: tuple[int, Path], tmp_path: Path) -> None:
    _, run_dir = straight
    shutil.copytree(run_dir, tmp_path / "run")
    one, two, three = (f"step_{step:08d}" for step in (1, 2, 3))
    assert run_ranks(prune_and_list, 1, tmp_path / "run")[0] == [[one, two, three], [two, three], [two, three], [three]]
