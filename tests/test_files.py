"""Files that are what was written or named, and reach the disk in order."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mcore_dsa.files import (
    DIGESTS,
    differing,
    digest_of,
    names_in,
    new_folder,
    read_digests,
    replace_text,
    write_digests,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "folder").mkdir()
    for name, size in {"a": 0, "b.bin": 100_000, "with a space": 3}.items():
        (tmp_path / "folder" / name).write_bytes(os.urandom(size))
    write_digests(
        tmp_path / "folder", {name: digest_of(tmp_path / "folder" / name) for name in ("a", "b.bin", "with a space")}
    )
    return tmp_path / "folder"


def test_digests_are_sha256sum_s(folder: Path) -> None:
    digests = read_digests(folder)
    assert digests == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names_in(folder)}
    assert differing(folder, digests, digests) == []
    subprocess.run(["sha256sum", "--quiet", "--check", DIGESTS], cwd=folder, check=True)
    by_tool = subprocess.run(["sha256sum", *digests], cwd=folder, check=True, capture_output=True, text=True)
    (folder / DIGESTS).write_text(by_tool.stdout)
    assert read_digests(folder) == digests


@pytest.mark.parametrize("how", ["flipped", "shorter", "longer", "empty", "missing", "a folder", "another's digest"])
def test_what_is_not_as_written_is_named(folder: Path, how: str) -> None:
    file = folder / "b.bin"
    content = file.read_bytes()
    changed = {
        "flipped": content[:50_000] + bytes([content[50_000] ^ 1]) + content[50_001:],
        "shorter": content[:-1],
        "longer": content + b"\0",
        "empty": b"",
    }
    if how in changed:
        file.write_bytes(changed[how])
        found = f"{file} has SHA-256 {digest_of(file)[:16]}… over {len(changed[how])} bytes; accepted is "
    elif how == "another's digest":
        (folder / DIGESTS).write_text((folder / DIGESTS).read_text().replace("with a space", "b.bin"))
        found = f"{file} has SHA-256 {digest_of(file)[:16]}… over 100000 bytes; accepted is "
    else:
        file.unlink()
        found = f"{file} is missing; accepted is the file that {DIGESTS} names"
    if how == "a folder":
        file.mkdir()
        found = f"{file} cannot be read: Is a directory"
    digests = read_digests(folder)
    (fault,) = differing(folder, digests, digests)
    assert fault.startswith(found)


@pytest.mark.parametrize("line", ["", "0" * 63 + "  a", "0" * 64 + " a", "0" * 64 + "  ", "Z" * 64 + "  a", "\0" * 80])
def test_digests_that_are_none_are_refused(folder: Path, line: str) -> None:
    (folder / DIGESTS).write_text(f"{'0' * 64}  a\n{line}\n")
    with pytest.raises(ValueError, match=f"line 2 of {folder / DIGESTS} is "):
        read_digests(folder)


def test_a_file_is_on_disk_before_its_name_and_the_name_before_anything_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def replaced(source: Path, target: Path) -> None:
        done.append(f"replace {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    replace_text(tmp_path / "latest", "step_1")
    assert done == ["sync latest.partial", "replace latest", f"sync {tmp_path.name}"]
    done.clear()
    with new_folder(tmp_path / "new") as partial:
        (partial / "file").write_text("x")
    sums, name = f"{DIGESTS}.partial", partial.name
    assert done == [
        "sync file",
        f"sync {sums}",
        f"replace {DIGESTS}",
        f"sync {name}",
        "replace new",
        f"sync {tmp_path.name}",
    ]


def test_a_folder_goes_to_where_a_link_leads(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    with new_folder(tmp_path / "link") as partial:
        (partial / "file").write_text("x")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "empty" / "file").read_text() == "x"
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(FileExistsError, match="dangling, which is there; accepted"), new_folder(tmp_path / "dangling"):
        pass


def test_a_partial_folder_is_removed_when_its_writer_is_dead(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write = f"""
import sys
from pathlib import Path
from mcore_dsa.files import new_folder
with new_folder(Path({str(tmp_path / "target")!r})) as folder:
    print(folder, flush=True)
    sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", write], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        partial = Path(writer.stdout.readline().strip())
        with new_folder(tmp_path / "target"):
            pass
        assert partial.is_dir()
        assert caplog.messages[-1].startswith(f"{partial} is left alone, it is in use")
        writer.kill()
    shutil.rmtree(tmp_path / "target")
    with new_folder(tmp_path / "target"):
        pass
    assert caplog.messages[-1] == f"removed {partial}, which a process that was killed had left"
    assert sorted(child.name for child in tmp_path.iterdir()) == ["target"]
