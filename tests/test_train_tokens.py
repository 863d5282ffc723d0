"""Token ids in place of bytes: of a tokenizer, and of Megatron's indexed data sets."""

import tempfile
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from train_runs import metrics, run, tiny, write_indexed

from mcore_dsa.train.data import Corpus, read_corpus

WORDS = ("[DOC]", "[UNK]", "the", "way", "of", "data", *(f"word{number}" for number in range(300)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Words as ids, and an id in front of each text."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="[DOC] $A", special_tokens=[("[DOC]", 0)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    words.save(str(path))
    return str(path)


def documents_of(corpus: Corpus) -> list[list[int]]:
    return [part.tolist() for part in np.split(corpus.tokens, corpus.starts)[1:]]


def test_text_is_read_as_the_ids_of_a_tokenizer_file_by_file(tokenizer: str, tmp_path: Path) -> None:
    texts = ["the way of data", "", "word7 of nothing", "data"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.txt").write_text(text)
    corpus = read_corpus([str(tmp_path)], max_bytes=1000, tokenizer=tokenizer)
    assert documents_of(corpus) == [[0, 2, 3, 4, 5], [0], [0, 13, 4, 1], [0, 5]]
    assert corpus.tokens.dtype == np.int32
    assert corpus.digest != read_corpus([str(tmp_path)], max_bytes=1000).digest
    # The limit is of bytes, and cuts the file that reaches it.
    assert documents_of(read_corpus([str(tmp_path)], max_bytes=7, tokenizer=tokenizer)) == [[0, 2, 3]]


@settings(max_examples=25, deadline=None)
@given(
    sets=st.lists(
        st.lists(st.lists(st.integers(0, 60_000), min_size=3, max_size=9), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
    tokens=st.integers(2, 200),
)
def test_indexed_data_sets_are_read_document_by_document(sets: list[list[list[int]]], dtype: type, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = [write_indexed(Path(folder, str(place)), documents, dtype) for place, documents in enumerate(sets)]
        assert_read(names, sets, dtype, tokens)


def assert_read(names: list[str], sets: list[list[list[int]]], dtype: type, tokens: int) -> None:
    every = [document for documents in sets for document in documents]
    size = np.dtype(dtype).itemsize
    corpus = read_corpus(names, max_bytes=1 << 20)
    assert documents_of(corpus) == every
    assert corpus.starts.tolist() == [0, *accumulate(map(len, every))][:-1]
    for ending in (".idx", ".bin"):
        assert read_corpus([name + ending for name in names], max_bytes=1 << 20).digest == corpus.digest
    # A token that the limit cuts is left out.
    part = read_corpus(names, max_bytes=tokens * size + size - 1)
    assert part.tokens.tolist() == corpus.tokens.tolist()[:tokens]
    ends = accumulate(sum(map(len, documents)) for documents in sets)
    assert part.cut == next((name for name, end in zip(names, ends, strict=True) if tokens < end), "")


# Megatron's reader ends with an error of its own where it could not begin.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ids_that_cannot_be_read_are_refused(tokenizer: str, tmp_path: Path) -> None:
    good, text = write_indexed(tmp_path / "good", [[1, 2, 3]]), tmp_path / "text.txt"
    text.write_text("the way")
    (tmp_path / "torn.idx").write_bytes(Path(f"{good}.idx").read_bytes()[:20])
    (tmp_path / "torn.bin").write_bytes(b"")
    refusals = {
        "such sets alone, and null": ([good, str(text)], None),
        "and tokenizer '.*' *; accepted with an indexed data set": ([good], tokenizer),
        "data has '.*torn'; accepted are PREFIX.idx and PREFIX.bin": ([str(tmp_path / "torn")], None),
        "data has '.*/nothing', which does not exist": ([str(tmp_path / "nothing")], None),
        "tokenizer is '.*text.txt'; accepted is a file such as tokenizer.json": ([str(text)], str(text)),
        "tokenizer is 'nowhere.json'; accepted is a file": ([str(text)], "nowhere.json"),
    }
    for sentence, (paths, by) in refusals.items():
        with pytest.raises(ValueError, match=sentence):
            read_corpus(paths, max_bytes=100, tokenizer=by)


def test_a_model_trains_on_ids_of_its_own_vocabulary(tmp_path: Path) -> None:
    from mcore_dsa.train.job import prepare

    generator = np.random.default_rng(3)
    documents = [generator.integers(0, 300, size).tolist() for size in generator.integers(3, 60, 40)]
    prefix = write_indexed(tmp_path / "ids", [*documents, [1, 2, 299]])
    options = (
        f"--data {prefix} --pack --training.micro_batch_size 1 --parallel.tensor 1 --training.steps 2",
        f"--evaluation.data {prefix}.idx --evaluation.every 1 --evaluation.batches 1",
    )
    with pytest.raises(ValueError, match=r"model\.vocab_size is 256; accepted is an integer > 299, the greatest token"):
        prepare(tiny(tmp_path / "run", *options), 1)
    run_ranks(run, 1, tiny(tmp_path / "run", *options, "--model.vocab_size 300"))
    # Of 320 embeddings: 300, padded to a multiple of 64.
    assert metrics(tmp_path / "run")[0]["loss"] == pytest.approx(np.log(320), rel=0.05)
