"""The command line: calls that cannot be answered, in one line for people and for programs."""

import json
import sys
from pathlib import Path
from typing import Any

import hf_checkpoints
import pytest
from command_line import command, tiny_checkpoint
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from mcore_dsa.binding import DsaStorage

FLASH = str(Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


ANY_SIZE = ["--tp", 2, "--seq", 8]
PLAN = ["plan", "--config", FLASH, "--tp", 2]
CONVERT = ["convert", "hf2mcore", "{tmp}/checkpoint", "{tmp}/t"]
REFUSED = {
    "no such configuration": (["plan", "--config", "nowhere.json", *ANY_SIZE], "nowhere.json"),
    "heads do not divide": (
        ["plan", "--config", FLASH, "--tp", 7, "--seq", 8],
        "tp_size is 7; accepted is a divisor of num_attention_heads=64",
    ),
    "no JSON": (["plan", "--config", "{tmp}/words.txt", *ANY_SIZE], "words.txt; accepted is a file of JSON"),
    "no fields": (["plan", "--config", "{tmp}/null.json", *ANY_SIZE], "null.json is None; accepted is an"),
    "nested": (["plan", "--config", "{tmp}/nested.json", *ANY_SIZE], "accepted is a file of JSON: it is nest"),
    "twice": (["verify", "{tmp}/checkpoint", "--config", "{tmp}/twice.json"], "a stands there twice"),
    "no geometry": (["plan", "--config", "{tmp}/empty.json", *ANY_SIZE], "hidden_size is missing"),
    "other sum": (
        [*PLAN, "--seq", 8, "--segments", "{tmp}/lengths.txt"],
        "lengths.txt adds up to 7; accepted is --seq 8",
    ),
    "no lengths": (
        [*PLAN, "--seq", 8, "--segments", "{tmp}/words.txt"],
        "words.txt has 'many'; accepted are integers >= 1",
    ),
    "no length": (
        [*PLAN, "--seq", 8, "--segments", "{tmp}/nothing.txt"],
        "nothing.txt is empty; accepted are integers >= 1",
    ),
    "empty document": (
        [*PLAN, "--seq", 7, "--segments", "{tmp}/zero.txt"],
        "zero.txt has '0'; accepted are integers >= 1",
    ),
    "no file of lengths": ([*PLAN, "--seq", 8, "--segments", "{tmp}/absent"], "absent"),
    "too many pools": ([*PLAN, "--seq", 10**17], "accepted are fewer than 2147483648 pools"),
    "chunks of another size": (
        [*PLAN, "--cp", 3, "--seq", 32],
        "a document is 32 tokens; accepted is, with --cp 3, a multiple of 6",
    ),
    "balanced over contexts": (
        [*PLAN, "--cp", 2, "--seq", 32, "--partition", "balanced"],
        "--partition is balanced; accepted are, with --cp 2, off and contiguous and zigzag",
    ),
    "no folder for a picture": ([*PLAN, "--seq", 32, "--plot", "{tmp}/absent/work.png"], "absent/work.png"),
    "no format for a picture": ([*PLAN, "--seq", 32, "--plot", "{tmp}/work.words"], "'words' is not supported"),
    "nothing to verify": (["verify", "{tmp}/absent"], "absent"),
    "a folder without a checkpoint": (["verify", "{tmp}"], "accepted is a folder with a .safetensors file"),
    "a target that is taken": (
        ["convert", "hf2mcore", "{tmp}/checkpoint", "{tmp}", "--tp", 2],
        "accepted is a new name or an empty folder",
    ),
    "layers of other kinds": (
        [*CONVERT, "--tp", 2, "--layers", "0-0"],
        "--layers is '0-0'; accepted is FIRST-LAST around some of the layers (1, 3, 4)",
    ),
    "layers that are none": ([*CONVERT, "--tp", 2, "--layers", "all"], "--layers is 'all'; accepted is FIRST-LAST"),
    "heads of a checkpoint": ([*CONVERT, "--tp", 3], "tp_size is 3; accepted is a divisor of num_attention_heads=4"),
    "no ranks": (
        ["convert", "mcore2hf", "{tmp}/absent", "{tmp}/t"],
        "absent; accepted is a folder with a .safetensors",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("as_json", [False, True])
def test_what_cannot_be_answered_is_refused_in_one_line(
    case: str, as_json: bool, checkpoint: Path, tmp_path: Path
) -> None:
    for name, text in {"words": "many of them", "nothing": "\n", "lengths": "3 4", "zero": "7 0"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    nested = '{"hidden_size": ' + 50_000 * "[" + 50_000 * "]" + "}"
    texts = {"empty": "{}", "null": '{"text_config": null}', "nested": nested, "twice": '{"a": 1, "a": 2}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    before = sorted(path.name for path in tmp_path.iterdir())
    words, message = REFUSED[case]
    status, out, err = command(*(str(word).replace("{tmp}", str(tmp_path)) for word in words), *["--json"] * as_json)
    if as_json:
        assert (status, err, out.count("\n")) == (2, "", 1)
        told = json.loads(out)
        assert told.keys() == {"ok", "error"}
        assert told["ok"] is False
        assert message in told["error"]
    else:
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.startswith("mcore-dsa: error: ")
        assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


COUNT = "accepted is an integer >= 1, of at most 18 digits"


@pytest.mark.parametrize(
    ("words", "usage", "message"),
    [
        ([], "mcore-dsa {plan,verify,convert,doctor,report}", "plan,verify,convert"),
        (["frobnicate"], "mcore-dsa {plan,verify,convert,doctor,report}", "frobnicate"),
        (["convert"], "mcore-dsa convert {hf2mcore,mcore2hf}", "hf2mcore,mcore2hf"),
        (["convert", "hf2hf"], "mcore-dsa convert {hf2mcore,mcore2hf}", "'hf2hf'"),
        (["convert", "hf2mcore", "source"], "mcore-dsa convert hf2mcore", "required: target, tp"),
        (["convert", "mcore2hf"], "mcore-dsa convert mcore2hf", "required: source, target"),
        (["plan", "--config", FLASH, "--seq", "8"], "mcore-dsa plan", "required: tp"),
        (["plan", "--config", FLASH, "--tp", "0", "--seq", "8"], "mcore-dsa plan", f"--tp: '0'; {COUNT}"),
        (["plan", "--config", FLASH, "--tp", "-1", "--seq", "8"], "mcore-dsa plan", f"--tp: '-1'; {COUNT}"),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", 5000 * "9"], "mcore-dsa plan", COUNT),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", "8", "--partition", "odd"], "mcore-dsa plan", "'odd'"),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", "8", "--kernels", "odd"], "mcore-dsa plan", "'odd'"),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", "8", "--device-bytes", "9GB"], "mcore-dsa plan", "'9GB'"),
        (["plan", "--config", FLASH, "--tp", "2", "--seq", "8", "--fast"], "mcore-dsa plan", "--fast"),
        (["verify"], "mcore-dsa verify", "required: path"),
    ],
)
def test_a_bad_command_line_shows_the_usage_of_its_command(words: list[str], usage: str, message: str) -> None:
    status, out, err = command(*words)
    assert (status, out) == (2, "")
    *lines, last = err.splitlines()
    assert lines[0].startswith(f"usage: {usage} ")
    assert last.startswith("mcore-dsa: error: ")
    assert message in last
    assert len(last) < 200
    status, out, err = command(*words, "--json")
    assert (status, err, out.count("\n")) == (2, "", 1)
    if len(words) > 1:
        assert json.loads(out) == {"ok": False, "error": last.removeprefix("mcore-dsa: error: ")}


@pytest.mark.parametrize(
    ("library", "words", "extra"),
    [
        ("jsonargparse", [*PLAN, "--seq", 8], "cli"),
        ("matplotlib", [*PLAN, "--seq", 8, "--plot", "work.png"], "plot"),
        ("safetensors", ["convert", "hf2mcore", "{checkpoint}", "target", "--tp", 2], "hf"),
    ],
)
def test_a_missing_library_is_named_with_what_brings_it(
    library: str, words: list[object], extra: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "mcore_dsa.cli.arguments", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    status, out, err = command(*(str(word).replace("{checkpoint}", str(checkpoint)) for word in words))
    assert (status, out) == (2, "")
    error = f"{library} is not installed; pip install 'mcore-dsa[{extra}]' brings it"
    assert err == f"mcore-dsa: error: {error}\n"
    status, out, err = command(*(str(word).replace("{checkpoint}", str(checkpoint)) for word in words), "--json")
    assert (status, json.loads(out), err) == (2, {"ok": False, "error": error}, "")


HOSTILE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**12, 10**39, -1, 128, [[]]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
FIELDS = [
    *hf_checkpoints.TINY,
    *("text_config", "quantization_config", "dtype", "torch_dtype"),
    *("quant_method", "weight_block_size", "quant_algo"),
]


@hypothesis_settings(max_examples=300)
@given(
    changes=st.dictionaries(st.sampled_from(FIELDS), HOSTILE, max_size=4),
    nested=st.booleans(),
    quantization=st.booleans(),
)
def test_no_configuration_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any], nested: bool, quantization: bool
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hostile"
    if not folder.exists():
        tiny_checkpoint(folder)
    config: dict[str, Any] = {**hf_checkpoints.TINY, **changes}
    if quantization:
        config["quantization_config"] = {
            **hf_checkpoints.QUANTIZATION[DsaStorage.FP8]["quantization_config"],
            **changes,
        }
    file = folder / "hostile.json"
    file.write_text(json.dumps({"text_config": config, **changes} if nested else config))
    for words in (
        ["verify", folder / "checkpoint", "--config", file],
        ["plan", "--config", file, "--tp", 1, "--seq", 8],
    ):
        status, out, err = command(*words, "--json")
        assert (status in (0, 1, 2), err) == (True, "")
        assert json.loads(out)
