"""What a run reads as tokens, and where each of its documents begins: bytes, a tokenizer's ids, indexed data sets."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mcore_dsa.train.indexed import indexed_documents, prefix_of

# Between two files; text does not contain it.
_SEPARATOR = b"\0"


@dataclass(frozen=True, kw_only=True, eq=False)
class Corpus:
    """The text that a run may read.

    Attributes:
        tokens: uint8, the files' bytes, one after the other, with a zero byte between two files; or int32, the ids of a
            tokenizer or an indexed data set.
        starts: int64, where each file's tokens begin; the zero byte behind a file is its last token.
        digest: of both; equal on two ranks, or before and after a resume, if and only if the text in its files is.
        left_out: what was met and is no regular file, or could not be read, each with the reason.
        cut: the file or data set in which the limit ends, what follows it not being read; empty where all is read.
    """

    tokens: npt.NDArray[np.integer]
    starts: npt.NDArray[np.int64]
    digest: str
    left_out: tuple[str, ...] = ()
    cut: str = ""

    @property
    def files(self) -> int:
        """How many files it comes from, a file cut off by the limit counted."""
        return len(self.starts)


def read_corpus(paths: Sequence[str], *, max_bytes: int, tokenizer: str | None = None) -> Corpus:
    """Read files and folders, or Megatron's indexed data sets by their prefixes, at most `max_bytes` bytes.

    Text is byte tokens, separators counted; or with a Hugging Face `tokenizer.json` its ids, of each file by itself,
    with the special tokens that the tokenizer itself adds to a text. Between the documents of a tokenizer or a data set
    nothing is put.

    Files come in the order of `paths`; a folder's own files sorted by name before its subfolders sorted by name,
    without hidden files and folders and `site-packages`. With no paths at all it is every `*.py` of the running
    interpreter's standard library. Links to files are followed, links inside a folder to other folders are not.

    Raises: ValueError for a path that does not exist, where there is no text, for a tokenizer that cannot be read or is
    given for indexed data sets, which hold ids already, and for indexed data sets among text.
    """
    left_out: list[str] = []
    cut: list[str] = []
    prefixes = [prefix_of(path) for path in paths]
    if any(prefixes):
        if tokenizer is not None or not all(prefixes):
            raise ValueError(
                f"data is {list(paths)} and tokenizer {tokenizer!r}; accepted with an indexed data set are such sets "
                "alone, and null"
            )
        tokens, starts = _joined(indexed_documents(list(filter(None, prefixes)), max_bytes=max_bytes, cut=cut))
    elif tokenizer is not None:
        encode = _encoder(tokenizer)
        tokens, starts = _joined(map(encode, _texts(paths, max_bytes, left_out, cut)))
    else:
        text = bytearray()
        starts = []
        for content in _texts(paths, max_bytes, left_out, cut, between=len(_SEPARATOR)):
            text += _SEPARATOR if text else b""
            starts.append(len(text))
            text += content
        tokens = np.frombuffer(bytes(text), dtype=np.uint8)
    if not len(tokens):
        found = f", where these were left out: {', '.join(left_out)}" if left_out else ""
        raise ValueError(f"data is {list(paths)}{found}; accepted are files, or folders of files, that hold text")
    begins = np.array(starts, dtype=np.int64)
    digest = hashlib.sha256(tokens)
    digest.update(begins)
    return Corpus(
        tokens=tokens, starts=begins, digest=digest.hexdigest(), left_out=tuple(left_out), cut="".join(cut[:1])
    )


def _texts(
    paths: Sequence[str], max_bytes: int, left_out: list[str], cut: list[str], *, between: int = 0
) -> Iterator[bytes]:
    """The files' contents, until they and `between` bytes between two of them reach the limit."""
    if paths:
        files: Iterator[Path] = chain.from_iterable(_files_of(_existing(path), left_out) for path in paths)
    else:
        files = _standard_library(left_out)
    read = 0
    for file in files:
        ahead = between if read else 0
        room = max_bytes - read - ahead
        # One byte more says whether there is more.
        content = _content(file, max(room, 0) + 1, left_out)
        if content is None:
            continue
        if len(content) <= room:
            yield content
            read += ahead + len(content)
            continue
        cut.append(str(file))
        if room + ahead > 0:
            yield content[:room]
        return


def _joined(documents: Iterable[npt.NDArray[np.int32]]) -> tuple[npt.NDArray[np.int32], list[int]]:
    """The tokens of all documents, and where each begins."""
    parts = list(documents)
    starts = list(accumulate(map(len, parts), initial=0))[:-1]
    return np.concatenate([np.empty(0, dtype=np.int32), *parts]), starts


def _encoder(path: str) -> Callable[[bytes], npt.NDArray[np.int32]]:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ValueError(
            f"tokenizer is {path!r}; accepted without tokenizers is null: pip install 'mcore-dsa[tokenizer]'"
        ) from error
    try:
        tokenizer = Tokenizer.from_file(path)
    # The library raises a plain Exception, for a file that is not there as well.
    except Exception as error:
        raise ValueError(f"tokenizer is {path!r}; accepted is a file such as tokenizer.json: {error}") from error

    def encode(text: bytes) -> npt.NDArray[np.int32]:
        try:
            return np.array(tokenizer.encode(text.decode("utf-8", errors="replace")).ids, dtype=np.int32)
        # Of text that it has no token for, and of an id that is none.
        except Exception as error:
            raise ValueError(
                f"tokenizer is {path!r}; accepted is one that knows every text, by ids below 2**31: {error}"
            ) from error

    return encode


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
