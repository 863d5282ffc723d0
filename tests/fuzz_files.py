"""What is fuzzed of configurations, checkpoints, ranks, records, jobs and texts, mostly as files, and of commands."""

import contextlib
import functools
import io
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hf_checkpoints
import yaml
from fuzz import Target
from hypothesis import strategies as st
from odd import WORDS, changed_arguments, changed_bytes, changed_tree, integers, values
from torch import Tensor

from mcore_dsa import DsaGeometry, DsaTpPlan
from mcore_dsa.binding import verify
from mcore_dsa.checkpoint import absorb_up_projections, load_attention, merge_attention
from mcore_dsa.cli import main
from mcore_dsa.files import DIGESTS
from mcore_dsa.hf_config import read_hf_config

ROOT = Path(__file__).parents[1]
REFUSAL = (ValueError, OSError)
# Of a checkpoint as small as one can be: a case writes it anew.
SIZES = {"hidden_size": 4, "q_lora_rank": 4, "kv_lora_rank": 2, "qk_nope_head_dim": 3, "v_head_dim": 2}
SIZES |= {"num_attention_heads": 2, "index_n_heads": 2, "index_head_dim": 2, "index_kpool": 2, "index_topk": 4}


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        yield Path(name)


def written(write: Callable[[Path], object]) -> dict[str, bytes]:
    """The files that `write` leaves in a folder, by name."""
    with scratch() as folder:
        write(folder)
        return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def _put(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def _split(safetensors: bytes) -> tuple[Any, bytes]:
    """Header and data."""
    length = int.from_bytes(safetensors[:8], "little")
    return json.loads(safetensors[8 : 8 + length]), safetensors[8 + length :]


def _joined(header: Any, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@st.composite
def changed_file(draw: st.DrawFn, name: str, data: bytes) -> bytes:
    """A file with its structure or its bytes changed."""
    if name == DIGESTS or draw(st.integers(0, 2)) == 0:
        return draw(changed_bytes(data))
    if name.endswith(".json"):
        return json.dumps(draw(changed_tree(json.loads(data)))).encode()
    header, tensors = _split(data)
    return _joined(draw(changed_tree(header)), tensors)


@st.composite
def _changed_files(draw: st.DrawFn, files: dict[str, bytes]) -> dict[str, bytes]:
    """A folder's files, one or two of them changed, or one gone; digests, which tell all of it, half of the time."""
    found = dict(files)
    if draw(st.booleans()):
        found.pop(DIGESTS, None)
    for name in draw(st.lists(st.sampled_from(sorted(found)), min_size=1, max_size=2, unique=True)):
        if draw(st.integers(0, 15)) == 0:
            del found[name]
        else:
            found[name] = draw(changed_file(name, files[name]))
    return found


@functools.cache
def _checkpoint(storage: hf_checkpoints.DsaStorage, files: int) -> dict[str, bytes]:
    config = hf_checkpoints.tiny_config(storage, **SIZES)
    tensors = hf_checkpoints.checkpoint_tensors(config, storage)
    return written(lambda folder: hf_checkpoints.write_checkpoint(folder, config, tensors, files))


@st.composite
def _checkpoints(draw: st.DrawFn) -> dict[str, bytes]:
    storage = draw(st.sampled_from(list(hf_checkpoints.DsaStorage)))
    return draw(_changed_files(_checkpoint(storage, draw(st.sampled_from((1, 2))))))


def _load(files: dict[str, bytes]) -> None:
    with scratch() as folder:
        binding = verify(_put(folder, files))
        json.dumps(binding.to_dict())
        assert (str(binding).count("\n") > 0) == bool(binding.faults)
        for layer in (*binding.layers[:4], *binding.mtp_layers[:4]):
            if not binding.faults_of((layer,)):
                assert len(load_attention(binding, layer, DsaTpPlan(0, 1, binding.geometry))) == 14


CONFIG = json.dumps(hf_checkpoints.tiny_config()).encode()


def _read(data: bytes) -> None:
    with scratch() as folder:
        (folder / "config.json").write_bytes(data)
        DsaGeometry.from_config(read_hf_config(folder))


def _command(*words: str) -> int:
    """A command's status; that of `--help` and `--version`, which end the process, too."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main(words)
        except SystemExit as end:
            status = end.code  # type: ignore[assignment]
    assert status in (0, 1, 2)
    if status == 2 and "--json" in words:
        assert json.loads(out.getvalue())["ok"] is False
    elif status == 2:
        assert err.getvalue().splitlines()[-1].startswith("mcore-dsa: error: ")
    return status


@functools.cache
def _ranks() -> dict[str, bytes]:
    def write(folder: Path) -> None:
        with scratch() as other:
            source = _put(other / "source", _checkpoint(hf_checkpoints.DsaStorage.BF16, 1))
            folder.rmdir()
            assert _command("convert", "hf2mcore", str(source), str(folder), "--tp", "2") == 0

    return written(write)


def _merge(files: dict[str, bytes]) -> None:
    with scratch() as folder:
        source = _put(folder / "source", files)
        status = _command("convert", "mcore2hf", str(source), str(folder / "target"), "--json")
        assert (status == 0) == (folder / "target").exists()


_OPTIONS = (
    "--config",
    "--tp",
    "--cp",
    "--seq",
    "--segments",
    "--partition",
    "--json",
    "--layers",
    "--template",
    "--help",
)
_COMMANDS = ("plan", "verify", "convert", "hf2mcore", "mcore2hf", "--version", "--", "-h")
_PARTS = (*_OPTIONS, *_COMMANDS, *(word for word in WORDS if "\0" not in word), "64", "zigzag", "{here}/checkpoint")
_PARTS += ("{here}/checkpoint/config.json", "{here}/lengths", "1-3", "{here}", "9" * 30, "٣", "{here}/target")
_SOUND = (
    ("plan", "--config", "{here}/checkpoint", "--tp", "2", "--seq", "64", "--segments", "{here}/lengths"),
    ("plan", "--config", "{here}/checkpoint", "--tp", "2", "--seq", "64", "--cp", "2", "--json"),
    ("verify", "{here}/checkpoint", "--json"),
    ("convert", "hf2mcore", "{here}/checkpoint", "{here}/target", "--tp", "2"),
    ("convert", "mcore2hf", "{here}/checkpoint", "{here}/target", "--template", "{here}/checkpoint"),
)


@st.composite
def _command_lines(draw: st.DrawFn) -> tuple[list[str], bytes]:
    words = draw(changed_tree(list(draw(st.sampled_from(_SOUND))), st.sampled_from(_PARTS) | integers, most=2))
    return [str(word) for word in words], draw(changed_bytes(b"40 24\n", most=1))


def _answer(case: tuple[list[str], bytes]) -> None:
    words, lengths = case
    with scratch() as folder:
        _put(folder / "checkpoint", _checkpoint(hf_checkpoints.DsaStorage.BF16, 2))
        (folder / "lengths").write_bytes(lengths)
        # Elsewhere than in the folder a word can be a path to write to.
        with contextlib.chdir(folder):
            _command(*(word.replace("{here}", str(folder)) for word in words))


JOBS = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "configs").glob("*.yaml"))]


@st.composite
def _jobs(draw: st.DrawFn) -> tuple[bytes, int]:
    text = yaml.safe_dump(draw(changed_tree(draw(st.sampled_from(JOBS))))).encode()
    return draw(changed_bytes(text)) if draw(st.integers(0, 3)) == 0 else text, draw(st.integers(1, 8))


def _job(case: tuple[bytes, int]) -> None:
    from mcore_dsa.train.config import parse_config
    from mcore_dsa.train.faults import faults_of
    from mcore_dsa.train.model import transformer_config

    text, ranks = case
    refused = ""
    with scratch() as folder:
        (folder / "run.yaml").write_bytes(text)
        try:
            config = parse_config(["--config", str(folder / "run.yaml")])
        except ValueError as error:
            refused = str(error)
    if refused:
        assert "\n" not in refused
        return
    faults = faults_of(config, ranks)
    assert all(isinstance(fault, str) and "; accepted" in fault for fault in faults)
    if not faults:
        transformer_config(config)


@st.composite
def _texts(draw: st.DrawFn) -> tuple[list[str], bytes, int]:
    paths = draw(
        st.lists(st.sampled_from((*WORDS, "{here}", "{here}/text", "{here}/none", "*", "http://x/")), max_size=3)
    )
    return [*paths, "{here}/text"], draw(changed_bytes(b"some text\n" * 3)), draw(st.integers(1, 100))


def _text(case: tuple[list[str], bytes, int]) -> None:
    from mcore_dsa.train.data import read_corpus

    paths, data, most = case
    with scratch() as folder:
        (folder / "text").write_bytes(data)
        with contextlib.chdir(folder):
            corpus = read_corpus([path.replace("{here}", str(folder)) for path in paths], max_bytes=most)
    assert 0 < len(corpus.tokens) <= most


@functools.cache
def _shards() -> tuple[DsaGeometry, list[dict[str, Tensor]]]:
    with scratch() as folder:
        _put(folder, _checkpoint(hf_checkpoints.DsaStorage.BF16, 1))
        binding = verify(folder)
        return binding.geometry, hf_checkpoints.shards(binding, 1, 2)


@st.composite
def _merges(draw: st.DrawFn) -> list[Any]:
    ranks: list[Any] = [dict(rank) for rank in _shards()[1]]
    place = draw(st.integers(0, 1))
    ranks[place] = draw(changed_arguments(ranks[place]))
    if draw(st.booleans()):
        del ranks[place][draw(st.sampled_from(sorted(ranks[place])))]
    return draw(st.sampled_from((ranks, ranks, ranks[:1], ranks * 2, [])))


def _merged(ranks: list[Any]) -> None:
    geometry, _ = _shards()
    for shard in ranks:
        absorb_up_projections(shard, geometry)
    assert len(dict(merge_attention(ranks, geometry))) == 14


@st.composite
def _configurations(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    storage = draw(st.sampled_from(list(hf_checkpoints.QUANTIZATION)))
    config = draw(changed_tree(hf_checkpoints.tiny_config(storage), values))
    return (draw(values) if draw(st.integers(0, 9)) == 0 else config), draw(integers | values), draw(integers | values)


def _configuration(case: tuple[Any, Any, Any]) -> None:
    config, rank, size = case
    geometry = DsaGeometry.from_config(config)
    plan = DsaTpPlan(rank, size, geometry)
    assert sum(tensor.local_bytes for tensor in plan.tensors) == plan.local_bytes


TARGETS = (
    # A word is a path, of which the system may say that it is not there or too long.
    Target("configurations", _configurations(), _configuration, (TypeError, *REFUSAL), 12),
    Target("config files", changed_bytes(CONFIG), _read, REFUSAL, 20),
    Target("checkpoints", _checkpoints(), _load, REFUSAL, 5),
    Target("files of ranks", st.deferred(lambda: _changed_files(_ranks())), _merge, (), 1),
    Target("command lines", _command_lines(), _answer, (), 2),
    # jsonargparse and Megatron have words of their own.
    Target("jobs", _jobs(), _job, (ValueError,), 1, explains=False),
    Target("ranks", st.deferred(_merges), _merged, (TypeError, ValueError), 4),
    Target("texts", _texts(), _text, REFUSAL, 4),
)
