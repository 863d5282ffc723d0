"""Selections in the format of rollout engines: the record of the same selections, or a refusal that names the token."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from records import as_rollout, assert_records_equal, random_record, without

from mcore_dsa import from_rollout, rollout

SIZES: dict[str, Any] = {"pool_size": 3, "budget": 4, "always_select_tail": True}


def last_rows(lengths: list[int], padded: list[int]) -> list[int]:
    starts = [sum(padded[:number]) for number in range(len(padded))]
    return [start + length - 1 for start, length in zip(starts, lengths, strict=True)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.booleans(), st.sampled_from([1, 2**20]), st.data())
def test_a_rollout_says_what_the_record_says(lengths: list[int], tail: bool, chunk: int, data: Any) -> None:
    """Whatever the order within a row, with rows of a prompt's prefix that nobody recorded, and padding."""
    padded = [length + data.draw(st.integers(0, 3)) for length in lengths]
    missing = last_rows(lengths, padded)
    prefix = range(data.draw(st.integers(0, lengths[0] - 1)))
    wanted = without(random_record(lengths, padded), [*missing, *prefix])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "CHUNK_BYTES", chunk)
        found = from_rollout(
            as_rollout(wanted, tail=tail), padded_lengths=padded, **{**SIZES, "always_select_tail": tail}
        )
    found.check()
    if tail:
        assert_records_equal(found, wanted)
    else:
        # Without a tail a row that sees no pool is empty in either case.
        assert torch.equal(found.selection_xTK, wanted.selection_xTK)
        assert torch.equal(found.missing_T, wanted.missing_T)


def test_a_row_may_be_wider_or_narrower_than_the_budget() -> None:
    (request,) = as_rollout(random_record([30]))
    wanted = from_rollout([request], **SIZES)
    wide = torch.nn.functional.pad(request, (3, 2), value=-1)
    assert_records_equal(from_rollout([wide], **SIZES), wanted)
    short = request[:5, :, :].sort(-1, descending=True).values[..., :5]
    assert torch.equal(
        from_rollout([short], **SIZES).selection_xTK, wanted.selection_xTK[:, :6].index_fill(1, torch.tensor([5]), -1)
    )


# Row 10 of one request of 12 tokens: pools 0, 1 and 2 and the tail 9, 10; the first two and the tail are given.
ROW = [4, 0, 1, 2, 9, 3, 10, 5, -1, -1, -1, -1, -1, -1]
BAD = {
    "out of range": ([12], r"layer 1, row 10 of request 1 selects token 12; accepted is -1 and tokens up to the row's"),
    "the future": ([11], "selects token 11; accepted is -1 and tokens up to the row's own"),
    "below": ([-2], "selects token -2; accepted is -1 and tokens"),
    "twice": ([4, 0, 1, 2, 9, 3, 10, 4], "selects token 4; accepted is a token once"),
    "a pool in part": ([-1], r"selects token 3; accepted is all 3 tokens of a pool"),
    "across two pools": ([6], "selects token 3; accepted is all 3 tokens of a pool"),
    "a tail in part": ([4, 0, 1, 2, -1], r"selects tokens \[4, 0, 1, 2, -1, 3, 10, 5\]; accepted is the whole tail"),
    "no tail": ([4, 0, 1, 2, -1, 3, -1], "accepted is the whole tail with always_select_tail"),
    "one layer alone": ([-1] * 14, "accepted is a row that all layers have, or none"),
    "too many pools": ([4, 0, 1, 2, 9, 3, 10, 5, 6, 7, 8], "selects token 6; accepted is at most 2 pools"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_no_selection_can_be_is_refused_with_layer_row_and_token(name: str) -> None:
    sizes = {**SIZES, "budget": 2}
    requests = as_rollout(random_record([7, 12], budget=2))
    requests[1] = torch.nn.functional.pad(requests[1], (0, 6), value=-1)
    requests[1][10, 1] = torch.tensor(ROW, dtype=torch.int32)
    from_rollout(requests, **sizes)
    head, message = BAD[name]
    requests[1][10, 1, : len(head)] = torch.tensor(head, dtype=torch.int32)
    with pytest.raises(ValueError, match=message) as raised:
        from_rollout(requests, **sizes)
    assert "row 10 of request 1" in str(raised.value)


def test_a_tail_of_a_model_without_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"row 0 of request 0 .* the whole tail with always_select_tail, and none of it"
    ):
        from_rollout(as_rollout(random_record([9])), **{**SIZES, "always_select_tail": False})


CALLS: list[tuple[list[Any], dict[str, Any], type[Exception], str]] = [
    ([torch.zeros(3, 2, 4).long()], {}, TypeError, "request 0 is torch.int64; accepted is torch.int32"),
    ([torch.zeros(3, 2).int()], {}, ValueError, r"request 0 has shape \(3, 2\); accepted is \[tokens - 1, layers"),
    ([torch.zeros(3, 2, 4).int(), torch.zeros(3, 1, 4).int()], {}, ValueError, r"request 1 has shape \(3, 1, 4\)"),
    ([], {}, ValueError, "requests holds no layer; accepted are"),
    ([torch.zeros(0, 2, 4).int()], {"padded_lengths": [0]}, ValueError, r"padded_lengths is \[0\] for requests of"),
    ([torch.zeros(0, 2, 4).int()], {"padded_lengths": [1, 1]}, ValueError, "accepted are as many, none shorter"),
    ([torch.zeros(0, 2, 4).int()], {"budget": 0}, ValueError, "budget is 0; accepted is an integer >= 1"),
    ([torch.zeros(0, 2, 4).int()], {"always_select_tail": 1}, TypeError, "always_select_tail is 1; accepted are"),
]


@pytest.mark.parametrize(("requests", "other", "kind", "message"), CALLS)
def test_what_is_no_rollout_is_refused(
    requests: Any, other: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        from_rollout(requests, **{**SIZES, **other})
