"""What is fuzzed of a run's folder: checkpoints of which any file may be changed, and its log."""

import functools
import json
from typing import Any

from fuzz import Target
from fuzz_files import scratch, written
from hypothesis import strategies as st
from megatron.core import parallel_state
from odd import WORDS, changed_bytes, changed_tree
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from train_runs import run, tiny, trainer_of, write_indexed

from mcore_dsa.cli.run_folder import RunFolder
from mcore_dsa.files import digest_of, names_in, write_digests
from mcore_dsa.train.checkpointing import load_checkpoint, resume_changes, resume_faults
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.data import read_corpus
from mcore_dsa.train.report import _drop_steps_after
from mcore_dsa.train.run_dir import refuse_something_else
from mcore_dsa.train.stored import Checkpoint, find_start

ONE = "--parallel.tensor 1 --training.steps 2 --training.decay_steps 2 --checkpoint.save_every 1"
LAYOUT = {"ranks": 1, "tensor": 1, "pipeline": 1, "virtual_pipeline": None, "context": 1, "expert": 1}


@functools.cache
def _run() -> tuple[JobConfig, dict[str, bytes]]:
    """A finished run's configuration, and its files by their paths in its folder."""
    with scratch() as folder:
        config = tiny(folder / "run", ONE)
        run(config)
        files = [path for path in (folder / "run").rglob("*") if path.is_file()]
        return config, {str(path.relative_to(folder / "run")): path.read_bytes() for path in files}


@st.composite
def _folders(draw: st.DrawFn) -> tuple[dict[str, bytes], bool, Any, Any]:
    """Files, whether their digests are made anew, and the two fields that say what to resume from."""
    files = dict(_run()[1])
    small = sorted(name for name, data in files.items() if len(data) < 2**16)
    for name in draw(st.lists(st.sampled_from((*small, *sorted(files))), max_size=2, unique=True)):
        if draw(st.integers(0, 7)) == 0:
            del files[name]
        elif name.endswith(".json") and draw(st.booleans()):
            files[name] = json.dumps(draw(changed_tree(json.loads(files[name])))).encode()
        elif name.endswith("latest") and draw(st.booleans()):
            files[name] = draw(st.sampled_from((*WORDS, "step_00000001", "../run", "step_9", "/"))).encode(
                errors="replace"
            )
        else:
            files[name] = draw(changed_bytes(files[name]))
    resume = draw(st.sampled_from((True, True, "auto", False)))
    return files, draw(st.booleans()), resume, draw(st.sampled_from((None, None, None, 1, 2, 3)))


def _resume(case: tuple[dict[str, bytes], bool, Any, Any]) -> None:
    files, sealed, resume, resume_from = case
    with scratch() as folder:
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        if sealed:
            for step in (folder / "checkpoints").glob("step_*"):
                write_digests(step, {name: digest_of(step / name) for name in names_in(step)})
        refuse_something_else(folder)
        _drop_steps_after(folder / "metrics.jsonl", 1)
        found = find_start(folder, resume, resume_from)
        if found is not None:
            assert found.step in (1, 2)
            assert all(isinstance(fault, str) for fault in resume_faults(found, _run()[0], "digest"))
            assert isinstance(resume_changes(found, _run()[0]), str)


@functools.cache
def _loader() -> tuple[Any, dict[str, bytes]]:
    """A trainer that loads, and the files of a checkpoint that it can."""
    config, files = _run()
    parallel_state.initialize_model_parallel()
    trainer, _ = trainer_of(config)
    first = "checkpoints/step_00000001/"
    return trainer, {name.removeprefix(first): data for name, data in files.items() if name.startswith(first)}


@st.composite
def _payloads(draw: st.DrawFn) -> dict[str, bytes]:
    files = dict(_loader()[1])
    for name in draw(st.lists(st.sampled_from((".metadata", "__0_0.distcp")), min_size=1, unique=True)):
        files[name] = draw(changed_bytes(files[name]))
    return files


def _load(files: dict[str, bytes]) -> None:
    """Whoever wrote these bytes has digested them."""
    trainer, _ = _loader()
    with scratch() as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        load_checkpoint(trainer, Checkpoint(folder=folder, step=1, run={}, layout=LAYOUT))


@functools.cache
def _tokenizers() -> tuple[dict[str, Any], ...]:
    """Words with and without one for what is unknown, and pieces of bytes."""
    words = Tokenizer(models.WordLevel({"some": 0, "text": 1, "?": 2}, unk_token="?"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="? $A", special_tokens=[("?", 2)])
    pieces = Tokenizer(models.BPE({"s": 0, "o": 1, "so": 2, "m": 3, "e": 4, "<0x20>": 5}, [("s", "o")]))
    pieces.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    unigrams = Tokenizer(models.Unigram([("?", 0.0), ("some", -1.0), ("text", -2.0)], 0, False))
    return tuple(json.loads(each.to_str()) for each in (words, pieces, unigrams))


@st.composite
def _tokenizer_files(draw: st.DrawFn) -> tuple[bytes, bytes]:
    tree = draw(changed_tree(draw(st.sampled_from(_tokenizers())), most=2))
    data = json.dumps(tree).encode()
    text = draw(changed_bytes(b"some text and more\n", most=2))
    return draw(changed_bytes(data)) if draw(st.integers(0, 4)) == 0 else data, text


def _tokenize(case: tuple[bytes, bytes]) -> None:
    tokenizer, text = case
    with scratch() as folder:
        (folder / "tokenizer.json").write_bytes(tokenizer)
        (folder / "text").write_bytes(text)
        corpus = read_corpus([str(folder / "text")], max_bytes=1000, tokenizer=str(folder / "tokenizer.json"))
    assert corpus.tokens.min() >= 0


@functools.cache
def _indexed() -> dict[str, bytes]:
    return written(lambda folder: write_indexed(folder / "set", [[1, 2, 3], [], [4] * 9, [5]]))


@st.composite
def _sets(draw: st.DrawFn) -> tuple[dict[str, bytes], int]:
    files = dict(_indexed())
    for name in draw(st.lists(st.sampled_from(sorted(files)), min_size=1, max_size=2, unique=True)):
        files[name] = draw(changed_bytes(files[name]))
    return files, draw(st.integers(1, 60))


def _read_set(case: tuple[dict[str, bytes], int]) -> None:
    files, most = case
    with scratch() as folder:
        for name, data in files.items():
            (folder / name).write_bytes(data)
        assert len(read_corpus([str(folder / "set")], max_bytes=most).tokens) <= most


def _read_log(data: bytes) -> None:
    with scratch() as folder:
        for name in ("metrics.jsonl", "starts.jsonl"):
            (folder / name).write_bytes(data)
        run = RunFolder.read(folder)
        assert run.steps
        assert set(run.resumed) <= {step["step"] for step in run.steps}
        assert all(isinstance(value, str) for value in run.ran.values())
        for name, over in (("loss", None), ("indexer_ms", "step_ms")):
            assert len(run.series(name, over)) <= len(run.steps)


STEP = b'{"step": %d, "loss": 5.5, "step_ms": 20.0, "indexer_ms": 4.0}\n'
START = b'{"first_step": %d, "steps": 9, "ranks": 2, "time": "", "ran": {"torch": "2"}}\n'
LOG = b"".join(line % step for step in range(1, 5) for line in (STEP, START))
REFUSAL = (ValueError, OSError)
TARGETS = (
    Target("run directories", st.deferred(_folders), _resume, REFUSAL, 1, prepare=_run),
    # Digests keep accidents out; what they are of may be anything.
    Target("payloads", st.deferred(_payloads), _load, (ValueError, RuntimeError), 22, explains=False, prepare=_loader),
    Target("tokenizers", st.deferred(_tokenizer_files), _tokenize, REFUSAL, 22),
    Target("indexed data", st.deferred(_sets), _read_set, REFUSAL, 4),
    Target("logs", changed_bytes(LOG), _read_log, REFUSAL, 6),
)
