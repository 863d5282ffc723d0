"""The training job's text: what is read, and which window of it is sample i."""

import errno
import os
import re
import socket
import sysconfig
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from train_runs import tiny

from mcore_dsa.train.data import Corpus, read_corpus
from mcore_dsa.train.samples import Place, Windows, micro_batches


def corpus_of(tokens: np.ndarray) -> Corpus:
    return Corpus(tokens=tokens.astype(np.uint8), starts=np.zeros(1, dtype=np.int64), digest="")


def window(windows: Windows, sample: int) -> bytes:
    """Its tokens and the last label."""
    found = windows[sample]
    assert np.array_equal(found.tokens[1:], found.labels[:-1])
    assert found.is_counted.all()
    assert found.lengths == found.padded == (len(found.tokens),)
    return found.tokens.tobytes() + found.labels[-1:].tobytes()


def windows_over(length: int, *, sequence_length: int, seed: int) -> Windows:
    """Over tokens that differ from place to place, so that a window says where it was cut (up to 256 * 251)."""
    place = np.arange(length)
    return Windows(corpus_of((place * 7 + place // 251) % 256), sequence_length=sequence_length, seed=seed)


@given(length=st.integers(2, 600), sequence_length=st.integers(1, 40), seed=st.integers(0, 2**31 - 1))
def test_every_epoch_holds_every_window_once(length: int, sequence_length: int, seed: int) -> None:
    if length <= sequence_length:
        length += sequence_length
    windows = windows_over(length, sequence_length=sequence_length, seed=seed)
    tokens = windows._tokens
    starts = range(0, length - sequence_length, sequence_length)
    expected = sorted(tokens[start : start + sequence_length + 1].tobytes() for start in starts)
    assert len(windows) == len(expected)
    for epoch in range(3):
        samples = range(epoch * len(windows), (epoch + 1) * len(windows))
        assert sorted(window(windows, sample) for sample in samples) == expected


@given(
    seed=st.integers(0, 2**31 - 1),
    samples=st.lists(st.integers(0, 200), min_size=1, max_size=20),
    count=st.integers(2, 40),
)
def test_a_sample_does_not_depend_on_what_was_read_before(seed: int, samples: list[int], count: int) -> None:
    windows = windows_over(count * 8 + 1, sequence_length=8, seed=seed)
    for sample in samples:
        fresh = windows_over(count * 8 + 1, sequence_length=8, seed=seed)
        assert window(windows, sample) == window(fresh, sample)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(window(windows, epoch * 50 + place) for place in range(50))
        for seed in (0, 1)
        for windows in [windows_over(401, sequence_length=8, seed=seed)]
        for epoch in (0, 1)
    }
    assert len(orders) == 4


def test_the_order_is_the_same_in_every_version_of_numpy() -> None:
    """A run resumed after an upgrade has to go on with the samples it would have had."""
    windows = Windows(corpus_of(np.arange(201)), sequence_length=2, seed=1234)
    assert [int(windows[sample].tokens[0]) for sample in (0, 1, 2, 100, 101, 102)] == [74, 28, 170, 42, 78, 64]


@given(
    data_parallel_size=st.sampled_from([1, 2, 3, 4]),
    micro_batch_size=st.integers(1, 4),
    count=st.integers(1, 3),
    step=st.integers(0, 5),
)
def test_a_step_reads_its_own_samples_once_over_all_ranks(
    data_parallel_size: int, micro_batch_size: int, count: int, step: int
) -> None:
    windows = windows_over(2001, sequence_length=5, seed=3)
    global_batch_size = data_parallel_size * micro_batch_size * count
    first = step * global_batch_size
    read = []
    for rank in range(data_parallel_size):
        for batch in micro_batches(
            windows,
            first_sample=first,
            micro_batch_size=micro_batch_size,
            count=count,
            place=Place(data_rank=rank, data_size=data_parallel_size, context_rank=0, context_size=1),
            device=torch.device("cpu"),
        ):
            assert batch.tokens_BL.shape == (micro_batch_size, 5)
            assert batch.tokens_BL.dtype == batch.labels_BL.dtype == torch.int64
            assert torch.equal(batch.tokens_BL[:, 1:], batch.labels_BL[:, :-1])
            assert batch.positions_BL.tolist() == [[0, 1, 2, 3, 4]] * micro_batch_size
            assert batch.packed is None
            assert batch.is_counted_BL.all()
            read += torch.cat([batch.tokens_BL, batch.labels_BL[:, -1:]], dim=1).tolist()
    assert sorted(read) == sorted(list(window(windows, first + sample)) for sample in range(global_batch_size))


def test_a_corpus_shorter_than_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.sequence_length is 8; accepted is less than the 8 tokens of data"):
        windows_over(8, sequence_length=8, seed=0)
    assert len(windows_over(9, sequence_length=8, seed=0)) == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {
        "b.txt": "bb",
        "a.txt": "a",
        "sub/c.txt": "ccc",
        "sub/.hidden": "x",
        ".git/config": "x",
        "site-packages/p.py": "x",
        "z.txt": "z",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def text_of(*paths: Path, max_bytes: int = 1000) -> bytes:
    return read_corpus([str(path) for path in paths], max_bytes=max_bytes).tokens.tobytes()


def test_folders_are_read_in_order_without_hidden_files(folder: Path) -> None:
    assert text_of(folder) == b"a\0bb\0z\0ccc"
    assert text_of(folder / "z.txt", folder / "sub") == b"z\0ccc"


def test_the_limit_of_bytes_is_kept_exactly(folder: Path) -> None:
    whole = text_of(folder)
    for limit in range(1, len(whole) + 3):
        corpus = read_corpus([str(folder)], max_bytes=limit)
        assert corpus.tokens.tobytes() == whole[:limit]
        # The file that has the first byte behind the limit, its separator being before it.
        of_files = {"a.txt": 1, "b.txt": 4, "z.txt": 6, "sub/c.txt": 10}
        cut = next((str(folder / name) for name, end in of_files.items() if limit < end), "")
        assert corpus.cut == cut


def test_every_file_begins_where_its_text_does(folder: Path) -> None:
    (folder / "empty.txt").touch()
    whole = [b"a\0", b"bb\0", b"\0", b"z\0", b"ccc"]
    for limit in range(1, 12):
        corpus = read_corpus([str(folder)], max_bytes=limit)
        parts = [part.tobytes() for part in np.split(corpus.tokens, corpus.starts)[1:]]
        assert corpus.files == len(parts)
        # The last one is cut, down to nothing where the limit ends behind a separator.
        assert [*parts[:-1], whole[len(parts) - 1][: len(parts[-1])]] == [*whole[: len(parts) - 1], parts[-1]]
        assert b"".join(parts) == corpus.tokens.tobytes()


def test_the_digest_follows_where_files_begin(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "one/a").write_text("a\0b")
    (tmp_path / "two/a").write_text("a")
    (tmp_path / "two/b").write_text("b")
    one, two = (read_corpus([str(tmp_path / name)], max_bytes=9) for name in ("one", "two"))
    assert one.tokens.tobytes() == two.tokens.tobytes()
    assert one.digest != two.digest


def test_the_digest_follows_the_text_alone(folder: Path) -> None:
    digest = read_corpus([str(folder)], max_bytes=100).digest
    assert digest == read_corpus([str(folder)], max_bytes=200).digest
    (folder / "z.txt").write_text("y")
    assert digest != read_corpus([str(folder)], max_bytes=100).digest


def test_paths_without_text_are_refused(folder: Path) -> None:
    (folder / "empty").mkdir()
    with pytest.raises(ValueError, match=r"data is \['.*/empty'\]; accepted are files, or folders of files, that hold"):
        text_of(folder / "empty")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("nowhere", "which does not exist"),
        ("no/where.txt", "which does not exist"),
        ("https://example.org/text.txt", "a URL"),
        ("s3://bucket/text", "a URL"),
        ("nowhere/*.txt", "a pattern that nothing matches"),
        ("nowhere[0-9]", "a pattern that nothing matches"),
    ],
)
def test_a_path_that_does_not_exist_is_said_to_be_what_it_looks_like(path: str, kind: str, folder: Path) -> None:
    with pytest.raises(ValueError, match="data has ") as refused:
        read_corpus([str(folder), path], max_bytes=1000)
    assert str(refused.value) == f"data has {path!r}, {kind}; accepted are files and folders on this machine"


def unreadable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands in a folder and is no file to read, with the reason that is given."""
    os.mkfifo(folder / "pipe")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "folder").symlink_to(folder.parent, target_is_directory=True)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
    # Permissions do not bind the superuser, who may run this.
    (folder / "forbidden").write_text("x")
    opened = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.name == "forbidden":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)
    return {
        "pipe": "no regular file",
        "dangling": "No such file or directory",
        "loop": "Too many levels of symbolic links",
        "folder": "no regular file",
        "socket": "no regular file",
        "forbidden": "Permission denied",
    }


def test_what_is_no_readable_file_is_left_out_and_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A short path: a socket's has at most 108 bytes.
    with tempfile.TemporaryDirectory() as name:
        odd = Path(name)
        reasons = unreadable(odd, monkeypatch)
        named = {f"{odd / entry} ({reason})" for entry, reason in reasons.items()}
        with pytest.raises(ValueError, match="where these were left out: ") as refused:
            text_of(odd)
        assert all(entry in str(refused.value) for entry in named)
        corpus = read_corpus([str(odd), str(odd / "pipe"), str(folder)], max_bytes=1000)
        assert corpus.tokens.tobytes() == text_of(folder)
        assert (set(corpus.left_out), len(corpus.left_out), corpus.files) == (named, len(named) + 1, 4)
        (odd / "link").symlink_to(folder / "a.txt")
        assert text_of(odd) == b"a"


def test_the_default_is_the_standard_library() -> None:
    folder = Path(sysconfig.get_path("stdlib"))
    first, second = islice(sorted(folder.glob("*.py")), 2)
    start = first.read_bytes() + b"\0" + second.read_bytes()
    corpus = read_corpus([], max_bytes=2**20)
    assert corpus.tokens.tobytes()[: len(start)] == start
    assert len(corpus.tokens) == 2**20
    assert corpus.files > 10


def test_a_run_says_where_its_data_is_cut_and_by_what(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from mcore_dsa.train.job import _tell_data, prepare

    (folder / "long.txt").write_text("x" * 500)
    _tell_data(prepare(tiny(folder / "run", f"--data {folder} --max_data_bytes 100"), 2))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"data is cut by max_data_bytes, 100, in {folder / 'long.txt'}: the rest is not read"]
    fault = f"accepted is less than the 1 tokens of data, which max_data_bytes ends in {folder / 'b.txt'}"
    with pytest.raises(ValueError, match=re.escape(fault)):
        prepare(tiny(folder / "run", f"--data {folder} --max_data_bytes 1"), 2)


def test_a_run_says_what_it_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from mcore_dsa.train import job

    os.mkfifo(folder / "sub" / "pipe")
    config = tiny(folder / "run", f"--data {folder / 'sub'} --training.sequence_length 2")
    job._tell_data(job.prepare(config, 2))
    said = [record.getMessage() for record in caplog.records if record.name == job.__name__]
    assert said == [f"1 entries of data were left out, among them {folder / 'sub/pipe'} (no regular file)"]
