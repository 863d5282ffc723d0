"""Real text as byte tokens, and which window of it is sample i of a run.

A sample is a pure function of the corpus, the seed and its number. Resuming therefore needs the number of samples
consumed and nothing else, tensor- and pipeline-parallel ranks agree without a message, and another data-parallel size
trains on the same samples.

Megatron's own GPTDataset promises the same and runs without a GPU, but wants the text as an indexed dataset on disk,
index caches beside it that one rank builds while the others wait, and a tokenizer object: for bytes in memory that is
more machinery than what follows, and a shared file system as well.

Shapes by suffix: B sequences of a micro batch, S rows of a sequence.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Between two files; text does not contain it.
_SEPARATOR = b"\0"


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The text that a run may read.

    Attributes:
        tokens: uint8, the files' bytes, one after the other, with a zero byte between two files.
        digest: of the tokens; equal on two ranks, or before and after a resume, if and only if the text is.
        files: how many files it comes from, a file cut off by the limit counted.
        left_out: what was met and is no regular file, or could not be read, each with the reason.
    """

    tokens: npt.NDArray[np.uint8]
    digest: str
    files: int
    left_out: tuple[str, ...] = ()


def read_corpus(paths: Sequence[str], *, max_bytes: int) -> Corpus:
    """Read files and folders, at most `max_bytes` bytes with separators counted.

    Files come in the order of `paths`; a folder's own files sorted by name before its subfolders sorted by name,
    without hidden files and folders and `site-packages`. With no paths at all it is every `*.py` of the running
    interpreter's standard library. Links to files are followed, links inside a folder to other folders are not.

    Raises: ValueError for a path that does not exist, and where there is no text.
    """
    left_out: list[str] = []
    if paths:
        files: Iterator[Path] = chain.from_iterable(_files_of(_existing(path), left_out) for path in paths)
    else:
        files = _standard_library(left_out)
    text = bytearray()
    count = 0
    for file in files:
        if len(text) >= max_bytes:
            break
        content = _content(file, max_bytes - len(text), left_out)
        if content is not None:
            text += (_SEPARATOR if text else b"") + content
            count += 1
    del text[max_bytes:]
    if not text:
        found = f", where these were left out: {', '.join(left_out)}" if left_out else ""
        raise ValueError(f"data is {list(paths)}{found}; accepted are files, or folders of files, that hold text")
    tokens = np.frombuffer(bytes(text), dtype=np.uint8)
    return Corpus(tokens=tokens, digest=hashlib.sha256(tokens).hexdigest(), files=count, left_out=tuple(left_out))


def _existing(path: str) -> Path:
    if os.path.lexists(path):
        return Path(path)
    kind = "which does not exist"
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path):
        kind = "a URL"
    elif re.search(r"[*?\[]", path):
        kind = "a pattern that nothing matches"
    raise ValueError(f"data has {path!r}, {kind}; accepted are files and folders on this machine")


def _files_of(path: Path, left_out: list[str]) -> Iterator[Path]:
    """`path` itself, or what is in it if it is a folder: files, and whatever else is no folder."""
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        is_folder = False
    if not is_folder:
        yield path
        return
    for folder, folders, files in path.walk(on_error=lambda error: left_out.append(_fault(error))):
        # In place: walk() descends into what is left, in this order.
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "site-packages")
        yield from (folder / name for name in sorted(files) if not name.startswith("."))


def _content(file: Path, limit: int, left_out: list[str]) -> bytes | None:
    """At most `limit` bytes of a file; None for what is left out."""
    try:
        # Before it is opened: a pipe would wait for a writer for good.
        if not stat.S_ISREG(file.stat().st_mode):
            left_out.append(f"{file} (no regular file)")
            return None
        with file.open("rb") as stream:
            return stream.read(limit)
    except OSError as error:
        left_out.append(_fault(error))
        return None


def _fault(error: OSError) -> str:
    return f"{error.filename} ({error.strerror})"


def _standard_library(left_out: list[str]) -> Iterator[Path]:
    return (file for file in _files_of(Path(sysconfig.get_path("stdlib")), left_out) if file.suffix == ".py")


class Windows:
    """Samples of `sequence_length + 1` consecutive tokens: every window once, in an order drawn anew each epoch.

    Windows overlap by the one token that is the last label of one and the first input of the next; tokens beyond the
    last whole window are not used.

    Args:
        corpus: the text.
        sequence_length: S.
        seed: of the order.

    Raises: ValueError where the corpus holds less than one window.
    """

    def __init__(self, corpus: Corpus, *, sequence_length: int, seed: int) -> None:
        self._tokens = corpus.tokens
        self._length = sequence_length
        self._seed = seed
        self._count = (len(corpus.tokens) - 1) // sequence_length
        if self._count < 1:
            raise ValueError(
                f"training.sequence_length is {sequence_length}; accepted is less than the {len(corpus.tokens)} bytes "
                "of data"
            )
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._count

    def __getitem__(self, sample: int) -> npt.NDArray[np.uint8]:
        """Tokens `[S + 1]` of sample number `sample` >= 0 of the run, which may lie in any epoch."""
        epoch, place = divmod(sample, self._count)
        if epoch != self._epoch:
            # RandomState and not a Generator: numpy keeps only the former's streams equal in all versions.
            self._order = np.random.RandomState([self._seed, epoch]).permutation(self._count)
            self._epoch = epoch
        start = int(self._order[place]) * self._length
        return self._tokens[start : start + self._length + 1]


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Input of one forward pass, int64.

    Attributes:
        tokens_BS: input tokens.
        labels_BS: the token after each of them.
        positions_BS: 0 to S - 1 in every row.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    positions_BS: Tensor


def micro_batches(
    windows: Windows,
    *,
    first_sample: int,
    micro_batch_size: int,
    count: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """The `count` micro batches of one rank in one step.

    The step's samples are numbered from `first_sample`. Micro batch m of data-parallel rank r takes the
    `micro_batch_size` samples from number `first_sample + (m * data_parallel_size + r) * micro_batch_size` on.
    """
    for index in range(count):
        start = first_sample + (index * data_parallel_size + data_parallel_rank) * micro_batch_size
        window_BS = np.stack([windows[sample] for sample in range(start, start + micro_batch_size)])
        window = torch.from_numpy(window_BS).to(device=device, dtype=torch.int64)
        tokens_BS, labels_BS = window[:, :-1].contiguous(), window[:, 1:].contiguous()
        positions_BS = torch.arange(tokens_BS.shape[1], device=device).expand_as(tokens_BS)
        yield MicroBatch(tokens_BS=tokens_BS, labels_BS=labels_BS, positions_BS=positions_BS)
