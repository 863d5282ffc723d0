"""Packs of files: what is in a sample, which rows of it a rank takes, and what the attention is told of them."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_dsa.plan import SelectionPlan
from mcore_dsa.train.data import Corpus
from mcore_dsa.train.samples import MicroBatch, Packs, Place, Sample, micro_batches

CPU = torch.device("cpu")


def corpus_of(lengths: list[int]) -> Corpus:
    """None of its tokens is 0, as padding is."""
    tokens = (np.arange(sum(lengths)) % 255 + 1).astype(np.uint8)
    starts = np.array([*accumulate(lengths, initial=0)][:-1], dtype=np.int64)
    return Corpus(tokens=tokens, starts=starts, digest="")


def packs_over(lengths: list[int], rows: int, multiple: int, seed: int = 0) -> Packs:
    return Packs(corpus_of(lengths), sequence_length=rows, document_multiple=multiple, seed=seed)


def token_by_token(lengths: list[int], rows: int, multiple: int) -> list[list[bytes]]:
    """The documents of each whole pack, filled one token after the other."""
    tokens = iter(corpus_of(lengths).tokens.tobytes())
    packs: list[list[bytes]] = [[]]
    row = 0
    for length in lengths:
        document = b""
        for _ in range(length):
            if row == rows:
                packs[-1] += [document] if document else []
                packs.append([])
                document, row = b"", 0
            document += bytes([next(tokens)])
            row += 1
        packs[-1] += [document] if document else []
        row += -row % multiple
    return packs if row == rows else packs[:-1]


def documents(sample: Sample) -> list[bytes]:
    starts = accumulate(sample.padded, initial=0)
    return [sample.tokens[start : start + size].tobytes() for start, size in zip(starts, sample.lengths, strict=False)]


@st.composite
def texts(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Lengths of files that fill at least one pack, rows of a pack, and what documents are padded to a multiple of."""
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    rows = multiple * draw(st.integers(1, 8))
    return [*draw(st.lists(st.integers(0, 40), max_size=30)), rows], rows, multiple


@given(text=texts(), seed=st.integers(0, 2**31 - 1))
def test_every_epoch_holds_the_text_once_in_whole_packs(text: tuple[list[int], int, int], seed: int) -> None:
    packs = packs_over(*text, seed=seed)
    expected = sorted(token_by_token(*text))
    assert len(packs) == len(expected)
    for epoch in range(2):
        samples = range(epoch * len(packs), (epoch + 1) * len(packs))
        assert sorted(documents(packs[sample]) for sample in samples) == expected


@given(text=texts())
def test_the_loss_counts_what_a_document_foretells_of_itself(text: tuple[list[int], int, int]) -> None:
    _, rows, multiple = text
    packs = packs_over(*text)
    for sample in (packs[number] for number in range(len(packs))):
        assert sum(sample.padded) == len(sample.tokens) == rows
        pairs = []
        for length, padded in zip(sample.lengths, sample.padded, strict=True):
            assert 0 <= padded - length < multiple
            assert padded % multiple == 0
            pairs += [True] * (length - 1) + [False] * (padded - length + 1)
        assert sample.is_counted.tolist() == pairs
        assert np.array_equal(sample.labels[:-1][sample.is_counted[:-1]], sample.tokens[1:][sample.is_counted[:-1]])
        # Of a row that is not counted nothing is known: not the next document's first token.
        assert not sample.labels[~sample.is_counted].any()


@given(text=texts(), samples=st.lists(st.integers(0, 200), min_size=1, max_size=10))
def test_a_pack_does_not_depend_on_what_was_read_before(text: tuple[list[int], int, int], samples: list[int]) -> None:
    packs = packs_over(*text)
    for sample in samples:
        assert documents(packs[sample]) == documents(packs_over(*text)[sample])


def test_a_corpus_shorter_than_a_pack_is_refused() -> None:
    with pytest.raises(ValueError, match=r"training\.sequence_length is 8; accepted is less than the 7 tokens of data"):
        packs_over([3, 4], 8, 1)
    # Padding counts: two documents of 4 rows each.
    assert len(packs_over([3, 4], 8, 4)) == 1


def ranks_of(packs: Packs, size: int) -> list[MicroBatch]:
    batches = []
    for rank in range(size):
        place = Place(data_rank=0, data_size=1, context_rank=rank, context_size=size)
        batches += micro_batches(packs, first_sample=0, micro_batch_size=1, count=1, place=place, device=CPU)
    return batches


@given(size=st.integers(1, 4), halves=st.lists(st.integers(0, 30), max_size=12), parts=st.integers(1, 8))
def test_context_parallel_ranks_hold_the_rows_that_the_attention_takes_theirs_for(
    size: int, halves: list[int], parts: int
) -> None:
    multiple = 2 * size
    rows = multiple * parts
    packs = packs_over([*halves, rows], rows, multiple)
    (whole,) = ranks_of(packs, 1)
    assert whole.packed is not None
    for rank, batch in enumerate(ranks_of(packs, size)):
        assert batch.packed is not None
        plan = SelectionPlan.packed(
            batch.packed.cu_seqlens_q,
            batch.packed.cu_seqlens_q_padded,
            pool_size=4,
            budget=2,
            partition="off",
            tp_rank=0,
            tp_size=1,
            cp_rank=rank,
            cp_size=size,
        )
        rows_L = plan.bounds.position_S
        for name in ("tokens_BL", "labels_BL", "positions_BL", "is_counted_BL"):
            assert torch.equal(getattr(batch, name), getattr(whole, name)[:, rows_L]), name


@given(text=texts())
def test_the_attention_is_told_where_documents_lie(text: tuple[list[int], int, int]) -> None:
    packs = packs_over(*text)
    sample, (batch,) = packs[0], ranks_of(packs, 1)
    packed = batch.packed
    assert packed is not None
    assert packed.qkv_format == "thd"
    assert packed.cu_seqlens_q.tolist() == packed.cu_seqlens_kv.tolist() == [*accumulate(sample.lengths, initial=0)]
    padded = [*accumulate(sample.padded, initial=0)]
    assert packed.cu_seqlens_q_padded.tolist() == packed.cu_seqlens_kv_padded.tolist() == padded
    assert packed.max_seqlen_q == packed.max_seqlen_kv == max(sample.padded)
    # Within a document positions count from 0, padding's go on.
    assert batch.positions_BL[0].tolist() == [place for length in sample.padded for place in range(length)]
