"""Configurations as they come: what is read, and what is refused in one sentence whatever the file holds."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcore_dsa.hf_config import parse_json, read_hf_config, shown


class Configuration:
    """As a library's object: known by `to_dict` alone."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    def to_dict(self) -> Any:
        return self.fields


def test_nested_and_flat_configurations_are_read_from_anything(tmp_path: Path) -> None:
    flat, nested = {"a": 1}, {"b": 2, "text_config": {"a": 1}}
    for held, top in ((flat, flat), (nested, nested), ({"text_config": Configuration(flat)}, None)):
        for given_as in (held, Configuration(held)):
            read = read_hf_config(given_as)
            assert read.text == flat
            assert top in (None, read.top)
            assert read_hf_config(read) is read
    path = tmp_path / "config.json"
    path.write_text(json.dumps(nested), encoding="utf-8")
    for given_as in (path, str(path), tmp_path):
        assert read_hf_config(given_as) == (f"text_config of {path}", nested, flat)


@pytest.mark.parametrize("config", [None, 45, ["config.json"], b"config.json", Configuration(3)])
def test_what_is_no_config_is_a_type_error(config: Any) -> None:
    with pytest.raises(
        TypeError, match=r"config is .*; accepted is a mapping, a configuration object with to_dict\(\)"
    ):
        read_hf_config(config)


@pytest.mark.parametrize("text", [None, [], [{}], "glm5_next_text", 3, True])
def test_a_text_part_that_holds_no_fields_is_refused(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": text}), encoding="utf-8")
    for config, source in (({"text_config": text}, "config"), (path, str(path))):
        with pytest.raises(ValueError, match="; accepted is an object of fields") as caught:
            read_hf_config(config)
        assert str(caught.value).startswith(f"text_config of {source} is {text!r}")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "a file of JSON: Expecting value"),
        (b"{", "a file of JSON"),
        (b"\xff", "a file of JSON: 'utf-8' codec"),
        (b"[1]", "a JSON object, not list"),
        (b'{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "c stands there twice"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number of 5000 digits stands there"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deep"),
        (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "at most 64 levels"),
        (b'{"a":' * 70 + b"1" + b"}" * 70, "at most 64 levels"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer, not the file itself"),
    ],
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for config in (path, tmp_path):
        with pytest.raises(ValueError, match=problem) as caught:
            read_hf_config(config)
        assert str(caught.value).startswith(f"config is {path}; accepted ")
        assert len(str(caught.value)) < 400 + len(str(path))


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "elsewhere"):
        with pytest.raises(FileNotFoundError, match=r"config\.json|elsewhere"):
            read_hf_config(path)
    # Nobody writes to this pipe: opening it would wait for ever.
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"config\.json; accepted is a regular file"):
        read_hf_config(tmp_path)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": "\u00e9"}', encoding="utf-8-sig")
    assert read_hf_config(path).top == {"a": "\u00e9"}


def json_values() -> st.SearchStrategy[Any]:
    leaves = st.none() | st.booleans() | st.integers(-(10**38), 10**38) | st.floats(allow_nan=False) | st.text()
    return st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@given(json_values())
def test_json_that_means_one_thing_is_read_as_it_stands(value: Any) -> None:
    assert parse_json(json.dumps(value).encode()) == value


@given(st.lists(st.sampled_from("abcdef"), min_size=1))
def test_a_key_may_stand_once(keys: list[str]) -> None:
    text = "{" + ",".join(f'"{key}": 0' for key in keys) + "}"
    if len(set(keys)) == len(keys):
        assert list(parse_json(text.encode())) == keys
        return
    with pytest.raises(ValueError, match="stands there twice") as caught:
        parse_json(text.encode())
    assert keys.count(str(caught.value)[0]) > 1


@given(json_values() | st.integers(10**4000, 10**5000))
def test_whatever_is_shown_is_short(value: Any) -> None:
    assert len(shown(value)) < 20_000


def test_small_values_are_shown_whole() -> None:
    for value in (None, True, -3, 1e-5, "text", [1, 2], {"a": [None]}, (3, 7)):
        assert shown(value) == repr(value)
