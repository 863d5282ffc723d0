"""What is fuzzed of a run's folder: checkpoints of which any file may be changed, and its log."""

import functools
import json
from typing import Any

from fuzz import Target
from fuzz_files import scratch, written
from hypothesis import strategies as st
from odd import WORDS, changed_bytes, changed_tree
from train_runs import run, tiny, write_indexed

from mcore_dsa.cli.run_folder import RunFolder
from mcore_dsa.files import digest_of, names_in, write_digests
from mcore_dsa.train.checkpointing import resume_changes, resume_faults
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.data import read_corpus
from mcore_dsa.train.report import _drop_steps_after
from mcore_dsa.train.run_dir import refuse_something_else
from mcore_dsa.train.stored import find_start

ONE = "--parallel.tensor 1 --training.steps 2 --training.decay_steps 2 --checkpoint.save_every 1"


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
    Target("indexed data", st.deferred(_sets), _read_set, REFUSAL, 4),
    Target("logs", changed_bytes(LOG), _read_log, REFUSAL, 6),
)
