"""Records of selections: what they refuse, what a file of them holds, how two of them compare."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import assert_records_equal, changed, fields_of, random_record, without
from safetensors import safe_open
from safetensors.torch import save_file

from mcore_dsa import PoolLayout, SelectionRecord, record
from mcore_dsa.record import documents_of

# Documents of 13, 3 and 24 tokens, of 4, 1 and 8 pools; the second begins at row 15, the third at 20.
LENGTHS, PADDED = (13, 3, 24), (15, 5, 24)


@st.composite
def documents(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    lengths = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
    return lengths, [length + draw(st.integers(0, 4)) for length in lengths]


@given(documents(), st.integers(1, 4), st.integers(1, 5))
def test_what_a_selector_could_make_is_sound(drawn: Any, pool_size: int, budget: int) -> None:
    sound = random_record(*drawn, pool_size=pool_size, budget=budget)
    sound.check()
    rows = torch.randperm(sum(drawn[1]))[:3].tolist()
    without(sound, rows).check()


FAULTS = {
    "out of range": (1, 12, [0, 8], r"of layer 1 at row 12, token 12 of document 0, is 8; .*0 <= id < 4.*out of range"),
    "below": (0, 12, [-2], "is -2; .*it is out of range"),
    "another document": (1, 17, [0, 1], "row 17, token 2 of document 1, is 1; .*another document, this one has 1 pool"),
    "the future": (0, 22, [0, 1], "row 22, token 2 of document 2, is 1; .*in the future, not complete at this row"),
    "twice": (0, 40, [0, 3, 3, 4], "is 3; .*it is there twice"),
    "twice apart": (0, 40, [0, 3, 4, 0], "is 0; .*it is there twice"),
    "out of order": (1, 40, [0, 4, 3, 5], "layer 1 at row 40, .* is 3; .*it is out of order"),
    "a hole": (1, 40, [0, -1, 3, 5], "layer 1 at row 40, .* is 3; .*it stands behind an unused slot"),
    "padding": (0, 13, [0], "row 13, token 13 of document 0, is 0; .*0 <= id < 0.*in the future"),
    "nothing": (1, 40, [-1] * 4, "first pool id of layer 1 at row 40, .* is -1; accepted is a pool of the 7 that"),
}


@pytest.mark.parametrize("rows_at_a_time", [1, 1000])
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_with_layer_row_and_id(
    name: str, rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "CHUNK_BYTES", 16 * 4 * rows_at_a_time)
    layer, row, ids, message = FAULTS[name]
    bad = changed(random_record(LENGTHS, PADDED), layer, row, ids)
    with pytest.raises(ValueError, match=message):
        bad.check()


def test_a_selection_where_there_is_no_record_is_refused() -> None:
    bad = changed(without(random_record(LENGTHS, PADDED), [30]), 1, 30, [2])
    with pytest.raises(
        ValueError, match=r"first pool id of layer 1 at row 30, .* is 2; accepted is -1 in a row without"
    ):
        bad.check()


@given(documents(), st.integers(0, 10**6), st.integers(-3, 9))
def test_any_change_of_an_id_that_no_selector_makes_is_found(drawn: Any, at: int, value: int) -> None:
    """Against the definition, row by row."""
    sound = random_record(*drawn, layers=1)
    selection_xTK = sound.selection_xTK.clone()
    if not selection_xTK.numel():
        return
    selection_xTK.view(-1)[at % selection_xTK.numel()] = value
    found = SelectionRecord(**fields_of(sound, selection_xTK=selection_xTK)).fault
    possible = True
    for row, seen in enumerate(sound.visible_T.tolist()):
        ids = selection_xTK[0, row].tolist()
        used = [pool for pool in ids if pool != -1]
        ascending = used == sorted(set(used)) and ids == used + [-1] * (len(ids) - len(used))
        possible &= ascending and all(0 <= pool < seen for pool in used) and bool(used) == (seen > 0)
    assert (found == "") == possible


SHAPES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"selection_xTK": torch.zeros(2, 44, 4)}, TypeError, "selection_xTK is torch.float32; accepted is torch.int32"),
    (
        {"selection_xTK": torch.zeros(2, 44, 4).long()},
        TypeError,
        "selection_xTK is torch.int64; accepted is torch.int32",
    ),
    ({"selection_xTK": torch.zeros(44, 4).int()}, ValueError, r"has shape \(44, 4\) on cpu; accepted are 3 dimensions"),
    (
        {"selection_xTK": torch.zeros(2, 43, 4).int()},
        ValueError,
        r"shape \[2, 43, 4\] .* accepted are \[layers >= 1, 44",
    ),
    ({"recorded_T": torch.ones(44)}, TypeError, "recorded_T is torch.float32; accepted is torch.bool"),
    ({"recorded_T": torch.ones(43).bool()}, ValueError, r"recorded_T \[43\]; accepted are"),
    (
        {"lengths": (16, 3, 24)},
        ValueError,
        r"lengths is \[16, 3, 24\] and padded_lengths \[15, 5, 24\]; accepted are as",
    ),
    ({"lengths": (13, 3)}, ValueError, "accepted are as many of both"),
    ({"pool_size": 0}, ValueError, "pool_size is 0; accepted is an integer >= 1"),
]


@pytest.mark.parametrize(("other", "kind", "message"), SHAPES)
def test_what_is_no_record_is_refused(other: dict[str, Any], kind: type[Exception], message: str) -> None:
    good = fields_of(random_record(LENGTHS, PADDED))
    SelectionRecord(**good)
    with pytest.raises(kind, match=message):
        SelectionRecord(**{**good, **other})


def test_a_file_brings_back_what_it_was_given(tmp_path: Path) -> None:
    saved = without(random_record(LENGTHS, PADDED), [12, 43])
    saved.save(tmp_path / "a.safetensors")
    loaded = SelectionRecord.load(tmp_path / "a.safetensors")
    assert_records_equal(loaded, saved)
    assert loaded.digest == saved.digest


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("safetensors.torch.save_file", cut)
    with pytest.raises(KeyboardInterrupt):
        random_record(LENGTHS, PADDED).save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_digest_tells_records_apart() -> None:
    one = random_record(LENGTHS, PADDED)
    others = [
        without(one, [12]),
        changed(one, 1, 40, [0, 1, 2, 3]),
        SelectionRecord(**fields_of(one, padded_lengths=(14, 6, 24))),
        SelectionRecord(**fields_of(one, pool_size=2)),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert random_record(LENGTHS, PADDED).digest == one.digest


FILES: dict[str, tuple[dict[str, Any], dict[str, str | None], str]] = {
    "another format": ({}, {"format": "pt"}, "'format': 'pt'.*; accepted is format 'mcore_dsa.selections'"),
    "another version": ({}, {"version": "2"}, "'version': '2'.*; accepted is .*version '1'"),
    "no lengths": ({}, {"lengths": None}, "lengths is None in the file's metadata; accepted are integers"),
    "text for lengths": ({}, {"lengths": "[1, true]"}, r"lengths is '\[1, true\]' in the file's metadata"),
    "other lengths": ({}, {"lengths": "[13, 3]"}, "accepted are as many of both"),
    "another dtype": ({"selection": torch.zeros(2, 44, 4)}, {}, "'selection': 'F32'.*; accepted is .*'I32'"),
    "another shape": ({"selection": torch.zeros(2, 40, 4).int()}, {}, r"selection_xTK has shape \[2, 40, 4\]"),
    "a tensor more": ({"scores": torch.zeros(3)}, {}, "holds .*'scores': 'F32'.*; accepted is"),
    "an id in the future": (
        {"selection": torch.full((2, 44, 4), 3).int()},
        {},
        "of layer 0 at row 0, .* is 3; accepted",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_holds_no_sound_record_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    random_record(LENGTHS, PADDED).save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    assert json.loads(metadata["lengths"]) == list(LENGTHS)
    others, said, message = FILES[name]
    kept = {key: value for key, value in {**metadata, **said}.items() if value is not None}
    save_file({**tensors, **others}, path, metadata=kept)
    with pytest.raises(ValueError, match=message):
        SelectionRecord.load(path)


def test_what_is_no_file_of_tensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"a.safetensors cannot be read: .*; accepted is a safetensors file"):
        SelectionRecord.load(tmp_path / "a.safetensors")
    with pytest.raises(FileNotFoundError):
        SelectionRecord.load(tmp_path / "b.safetensors")


@given(documents(), st.integers(0, 5))
def test_two_records_compare_over_the_rows_that_both_have(drawn: Any, seed: int) -> None:
    one, other = random_record(*drawn, seed=seed), random_record(*drawn, seed=seed + 1)
    rows = torch.randperm(sum(drawn[1]))[:3].tolist()
    for layer, found in enumerate(without(one, rows).agreement(other)):
        wanted = {"layer": layer, "rows": 0, "rows_differing": 0, "pools": 0, "pools_equal": 0}
        for row in set((one.visible_T > 0).nonzero().flatten().tolist()) - set(rows):
            mine, theirs = (set(r.selection_xTK[layer, row].tolist()) - {-1} for r in (one, other))
            wanted["rows"] += 1
            wanted["rows_differing"] += mine != theirs
            wanted["pools"] += len(mine)
            wanted["pools_equal"] += len(mine & theirs)
        assert found._asdict() == wanted
        assert found.share == (wanted["pools_equal"] / wanted["pools"] if wanted["pools"] else 1)
    assert all(layer.share == 1 and not layer.rows_differing for layer in one.agreement(one))
    with pytest.raises(ValueError, match=r"own.budget is 3; accepted is that of the record, 4"):
        one.agreement(random_record(*drawn, budget=3))


def test_documents_of_a_layout() -> None:
    packed = PoolLayout.from_segments(torch.tensor([[0, 5, 5]]), torch.tensor([[3, 5, 9]]), num_tokens=12, pool_size=4)
    assert documents_of(packed) == ((3, 0, 4), (5, 0, 7))
    valid = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    assert documents_of(PoolLayout.from_padding_mask(valid, pool_size=2)) == ((0, 2, 4), (2, 2, 4))
