"""Which part of a corpus is sample i of a run, and the rows of it that a rank takes.

A sample is a pure function of the corpus, the seed and its number. Resuming therefore needs the number of samples
consumed and nothing else, tensor-, pipeline- and context-parallel ranks agree without a message, and another
data-parallel size trains on the same samples.

Megatron's own GPTDataset promises the same and runs without a GPU, but wants the text as an indexed dataset on disk,
index caches beside it that one rank builds while the others wait, and a tokenizer object: for bytes in memory that is
more machinery than what follows, and a shared file system as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_dsa.plan import context_rows
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.data import Corpus


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One sequence or pack of a run, whole.

    Attributes:
        tokens: `[S]`, of the corpus' dtype. labels: `[S]`, the token after each of them.
        is_counted: bool `[S]`, whether the label is one: not on padding, and not where a document ends.
        lengths: tokens of each document. padded: rows that each of them takes; they add up to S.
    """

    tokens: npt.NDArray[np.integer]
    labels: npt.NDArray[np.integer]
    is_counted: npt.NDArray[np.bool_]
    lengths: tuple[int, ...]
    padded: tuple[int, ...]


class _Order:
    """Every one of `count` places once, in an order drawn anew each epoch."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._epoch = -1
        self._places = np.empty(0, dtype=np.int64)

    def __call__(self, sample: int) -> int:
        epoch, place = divmod(sample, self._count)
        if epoch != self._epoch:
            # RandomState and not a Generator: numpy keeps only the former's streams equal in all versions.
            self._places = np.random.RandomState([self._seed, epoch]).permutation(self._count)
            self._epoch = epoch
        return int(self._places[place])


class Windows:
    """Samples of consecutive tokens: every window once, in an order drawn anew each epoch.

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
        self._count = (len(corpus.tokens) - 1) // sequence_length
        if self._count < 1:
            raise _too_short(corpus, sequence_length)
        self._place = _Order(self._count, seed)

    def __len__(self) -> int:
        """Windows in an epoch."""
        return self._count

    def lengths(self, sample: int) -> tuple[int, ...]:
        """Tokens of each document of a sample."""
        return (self._length,)

    def __getitem__(self, sample: int) -> Sample:
        """Sample number `sample` >= 0 of the run, which may lie in any epoch."""
        start = self._place(sample) * self._length
        window = self._tokens[start : start + self._length + 1]
        return Sample(
            tokens=window[:-1],
            labels=window[1:],
            is_counted=np.ones(self._length, dtype=np.bool_),
            lengths=(self._length,),
            padded=(self._length,),
        )


class Packs:
    """Samples of whole files, one after the other, each padded to a multiple: every pack once an epoch, as `Windows`.

    Packs are filled in the order of the corpus. A file that does not fit in what is left is cut there, and what is cut
    off is a document of its own at the head of the next pack. Files behind the last whole pack are not used.

    Args:
        corpus: the text.
        sequence_length: S, a multiple of document_multiple.
        document_multiple: tokens that each document is padded to a multiple of.
        seed: of the order.

    Raises: ValueError where the corpus holds less than one pack.
    """

    def __init__(self, corpus: Corpus, *, sequence_length: int, document_multiple: int, seed: int) -> None:
        self._tokens = corpus.tokens
        self._length = sequence_length
        self._multiple = document_multiple
        self._packs = _filled([*map(int, corpus.starts), len(corpus.tokens)], sequence_length, document_multiple)
        if not self._packs:
            raise _too_short(corpus, sequence_length)
        self._place = _Order(len(self._packs), seed)

    def __len__(self) -> int:
        """Packs in an epoch."""
        return len(self._packs)

    def lengths(self, sample: int) -> tuple[int, ...]:
        """Tokens of each document of a sample."""
        return tuple(map(len, self._packs[self._place(sample)]))

    def __getitem__(self, sample: int) -> Sample:
        """Sample number `sample` >= 0 of the run, which may lie in any epoch."""
        parts = self._packs[self._place(sample)]
        tokens, labels = np.zeros((2, self._length), dtype=self._tokens.dtype)
        is_counted = np.zeros(self._length, dtype=np.bool_)
        padded = tuple(_ceil(len(part), self._multiple) for part in parts)
        for row, part in zip(accumulate(padded, initial=0), parts, strict=False):
            tokens[row : row + len(part)] = self._tokens[part.start : part.stop]
            labels[row : row + len(part) - 1] = self._tokens[part.start + 1 : part.stop]
            is_counted[row : row + len(part) - 1] = True
        return Sample(
            tokens=tokens, labels=labels, is_counted=is_counted, lengths=tuple(map(len, parts)), padded=padded
        )


def samples_of(config: JobConfig, corpus: Corpus) -> Windows | Packs:
    """What the run reads.

    Raises: ValueError where the corpus holds less than one sample.
    """
    length, seed = config.training.sequence_length, config.training.seed
    if config.pack:
        return Packs(corpus, sequence_length=length, document_multiple=config.document_multiple, seed=seed)
    return Windows(corpus, sequence_length=length, seed=seed)


def _filled(edges: Sequence[int], rows: int, multiple: int) -> list[list[range]]:
    """The whole packs of `rows` rows that documents between `edges` fill, as ranges of tokens."""
    packs: list[list[range]] = []
    room = 0
    for start, stop in pairwise(edges):
        while start < stop:
            if room == 0:
                packs.append([])
                room = rows
            part = range(start, min(stop, start + room))
            packs[-1].append(part)
            start = part.stop
            room -= _ceil(len(part), multiple)
    return packs[:-1] if room else packs


def _ceil(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _too_short(corpus: Corpus, sequence_length: int) -> ValueError:
    ends = f", which max_data_bytes ends in {corpus.cut}" if corpus.cut else ""
    return ValueError(
        f"training.sequence_length is {sequence_length}; accepted is less than the {len(corpus.tokens)} tokens of data"
        + ends
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Input of one forward pass: a context-parallel rank's rows L of B samples.

    Attributes:
        tokens_BL: int64, input tokens.
        labels_BL: int64, the token after each of them.
        positions_BL: int64, places in their document.
        is_counted_BL: bool, whether the loss counts it.
        packed: where the documents of a pack lie in all its rows, None for sequences.
    """

    tokens_BL: Tensor
    labels_BL: Tensor
    positions_BL: Tensor
    is_counted_BL: Tensor
    packed: PackedSeqParams | None


@dataclass(frozen=True, kw_only=True)
class Place:
    """A rank among those that read: samples differ over data-parallel ranks, their rows over context-parallel ones."""

    data_rank: int
    data_size: int
    context_rank: int
    context_size: int


def micro_batches(
    samples: Windows | Packs,
    *,
    first_sample: int,
    micro_batch_size: int,
    count: int,
    place: Place,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """The `count` micro batches of one rank in one step.

    The step's samples are numbered from `first_sample`. Micro batch m of data-parallel rank r of R takes the
    `micro_batch_size` samples from number `first_sample + (m * R + r) * micro_batch_size` on.
    """
    for index in range(count):
        start = first_sample + (index * place.data_size + place.data_rank) * micro_batch_size
        batch = [samples[sample] for sample in range(start, start + micro_batch_size)]
        packed = _packed(batch[0], device) if isinstance(samples, Packs) else None
        yield _micro_batch(batch, packed, place, device)


def _micro_batch(
    batch: Sequence[Sample], packed: PackedSeqParams | None, place: Place, device: torch.device
) -> MicroBatch:
    padded = batch[0].padded
    positions = np.concatenate([np.arange(length) for length in padded])
    size = place.context_size
    # By documents, as the attention takes them: half of a pack cut as a whole would be other rows.
    rows = slice(None) if size == 1 else context_rows(padded, place.context_rank, size)

    def own(arrays: Sequence[npt.NDArray[np.generic]], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.stack(arrays))[:, rows].to(device=device, dtype=dtype).contiguous()

    return MicroBatch(
        tokens_BL=own([sample.tokens for sample in batch], torch.int64),
        labels_BL=own([sample.labels for sample in batch], torch.int64),
        positions_BL=own([positions] * len(batch), torch.int64),
        is_counted_BL=own([sample.is_counted for sample in batch], torch.bool),
        packed=packed,
    )


def _packed(sample: Sample, device: torch.device) -> PackedSeqParams:
    """Megatron's description of a pack: lengths of the documents, and of the rows that they take."""
    real, padded = (
        torch.tensor([*accumulate(sizes, initial=0)], dtype=torch.int32, device=device)
        for sizes in (sample.lengths, sample.padded)
    )
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=max(sample.padded),
        max_seqlen_kv=max(sample.padded),
    )
