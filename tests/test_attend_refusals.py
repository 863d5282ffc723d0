"""What sparse and masked attention refuse: the argument, its value and what is accepted, before anything is indexed."""

from dataclasses import replace

import pytest
import torch
from attend_cases import Case
from draw import layout_of

from mcore_dsa.functions import masked_attention, sparse_attention
from mcore_dsa.kpool import PoolLayout

SEGMENTS = [[(0, 9), (9, 21)], [(4, 21), (21, 21)]]


def refuse(case: Case, kind: type[Exception], match: str, **overrides) -> None:
    arguments = {
        "softmax_scale": case.scale,
        "always_select_tail": case.tail,
        "q": case.q,
        "kv": case.kv,
        "selection": case.selection,
        "layout": case.layout,
        "position": case.position,
    } | overrides
    tensors = [arguments.pop(name) for name in ("q", "kv", "selection", "layout", "position")]
    with pytest.raises(kind, match=match):
        sparse_attention(*tensors, **arguments)


@pytest.fixture
def case() -> Case:
    return Case.random(SEGMENTS, 21)


@pytest.mark.parametrize(
    ("name", "spoil", "kind", "match"),
    [
        ("q", lambda q: q.tolist(), TypeError, "q_SBHC is list; accepted is a tensor"),
        ("q", lambda q: q.int(), TypeError, r"q_SBHC is torch.int32; accepted is a tensor of torch.float16"),
        ("q", lambda q: q.flatten(2), ValueError, r"q_SBHC has shape \(21, 2, 64\); accepted are 4 dimensions"),
        ("q", lambda q: q[:20], ValueError, r"q_SBHC has shape \(20, 2, 4, 16\); accepted is \[21, 2, "),
        ("q", lambda q: q[:, :1], ValueError, r"q_SBHC has shape \(21, 1, 4, 16\); accepted is \[21, 2, "),
        ("q", lambda q: q[..., :8], ValueError, r"q_SBHC .* and kv_TBC .* accepted are equal last dimensions"),
        ("q", lambda q: q[:, :, :0], ValueError, "at least one channel and one head"),
        ("q", lambda q: q.to("meta"), ValueError, "q_SBHC is on meta; accepted is the layout's device, cpu"),
        ("kv", lambda kv: None, TypeError, "kv_TBC is NoneType"),
        ("kv", lambda kv: kv.bool(), TypeError, "kv_TBC is torch.bool"),
        ("kv", lambda kv: kv.unsqueeze(2), ValueError, r"kv_TBC has shape \(21, 2, 1, 16\); accepted are 3 dimensions"),
        ("kv", lambda kv: kv[:20], ValueError, r"kv_TBC has shape \(20, 2, 16\); accepted is \[21, 2, channels\]"),
        ("kv", lambda kv: kv.to("meta"), ValueError, "kv_TBC is on meta"),
        ("selection", lambda x: x.tolist(), TypeError, "selection_BSK is list"),
        ("selection", lambda x: x.long(), TypeError, "selection_BSK is torch.int64; accepted is torch.int32"),
        ("selection", lambda x: x.float(), TypeError, "selection_BSK is torch.float32; accepted is torch.int32"),
        ("selection", lambda x: x[0], ValueError, r"selection_BSK has shape \(21, 3\); accepted is \[2, 21, budget\]"),
        ("selection", lambda x: x.transpose(0, 1), ValueError, r"selection_BSK has shape \(21, 2, 3\)"),
        ("selection", lambda x: x.to("meta"), ValueError, "selection_BSK is on meta"),
        ("layout", lambda x: 4, TypeError, "layout is int; accepted is a PoolLayout"),
        ("layout", lambda x: PoolLayout.dense(20, pool_size=4, batch=2), ValueError, "kv_TBC has shape .* accepted is"),
        ("layout", lambda x: PoolLayout.dense(21, pool_size=4), ValueError, "selection_BSK has shape"),
        ("position", lambda x: x.float(), TypeError, "position_S is torch.float32"),
        ("position", lambda x: x[:20], ValueError, r"selection_BSK has shape \(2, 21, 3\); accepted is \[2, 20, "),
        ("position", lambda x: x.expand(2, -1), ValueError, "position_S has shape"),
        ("position", lambda x: x.to("meta"), ValueError, "position_S is on meta"),
        ("softmax_scale", lambda x: "1", ValueError, "softmax_scale is '1'; accepted is a finite number"),
        ("softmax_scale", lambda x: float("inf"), ValueError, "softmax_scale is inf"),
        ("softmax_scale", lambda x: torch.ones(2), ValueError, "softmax_scale is tensor"),
        ("always_select_tail", lambda x: None, TypeError, "always_select_tail is None; accepted are True and False"),
        ("attend_bytes", lambda x: 1e9, TypeError, "attend_bytes is 1000000000.0; accepted is an integer"),
        ("attend_bytes", lambda x: True, TypeError, "attend_bytes is True"),
        ("attend_bytes", lambda x: -1, ValueError, "attend_bytes is -1; accepted are at least"),
    ],
)
def test_bad_argument(case: Case, name: str, spoil, kind, match: str) -> None:
    refuse(case, kind, match, **{name: spoil(getattr(case, name, None))})


@pytest.mark.parametrize(
    ("ids", "match"),
    [
        ([5, -1, -1], r"pool ids from -1 to 5; accepted are -1 and \[0, 5\)"),
        ([2**31 - 1, -1, -1], "accepted are -1 and"),
        ([-2, -1, -1], "pool ids from -2"),
        # The row stands in the second document, at its sixth token: its pools are 2, of which it sees the first.
        ([1, -1, -1], "cannot see"),
        ([3, -1, -1], "cannot see"),
        ([2, 2, -1], "repeats or disorders pool ids; accepted are ascending ids, -1 behind them"),
        ([-1, 2, -1], "repeats or disorders"),
        ([2, -1, 2], "repeats or disorders"),
    ],
)
@pytest.mark.parametrize("attend_bytes", [40_000, 2**20])
def test_bad_selection(case: Case, ids: list[int], match: str, attend_bytes: int) -> None:
    case.selection[0, 14] = torch.tensor(ids, dtype=torch.int32)
    refuse(case, ValueError, match, attend_bytes=attend_bytes)


def test_descending_ids(case: Case) -> None:
    case.selection[0, 20] = torch.tensor([4, 3, -1], dtype=torch.int32)
    refuse(case, ValueError, "repeats or disorders")
    case.selection[0, 20] = torch.tensor([3, 4, -1], dtype=torch.int32)
    case.out()


@pytest.mark.parametrize("name", ["kv", "selection", "layout", "position"])
def test_what_was_made_in_inference_mode_is_refused_where_gradients_are_needed(case: Case, name: str) -> None:
    """Autograd would refuse it too, without a name, and once all of forward is computed."""
    with torch.inference_mode():
        made = layout_of(SEGMENTS, num_tokens=21, pool_size=4) if name == "layout" else getattr(case, name).clone()
    learning = replace(case, q=case.q.clone().requires_grad_())
    said = rf"^{name}(_\w+)? is made in inference mode; accepted is one made outside it where gradients are needed$"
    refuse(learning, ValueError, said, **{name: made})
    evaluated = replace(learning, **{name: made})
    with torch.no_grad():
        assert torch.equal(evaluated.out(), case.out())
    assert torch.equal(replace(case, **{name: made}).out(), case.out())


def test_budget_too_small_names_the_smallest_that_works(case: Case) -> None:
    with pytest.raises(ValueError, match="hold one row of 2 samples with 16 token slots") as refusal:
        case.out(attend_bytes=1000)
    smallest = int(str(refusal.value).split("at least ")[1].split(",")[0])
    case.run(attend_bytes=smallest)
    refuse(
        case, ValueError, f"attend_bytes is {smallest - 1}; accepted are at least {smallest}", attend_bytes=smallest - 1
    )


@pytest.mark.parametrize(
    ("name", "spoil", "kind", "match"),
    [
        ("q", lambda q: q[0], ValueError, "q_SBHC has shape .* accepted are 4 dimensions"),
        ("q", lambda q: q[:, :1], ValueError, "q_SBHC has shape .* accepted are"),
        ("kv", lambda kv: kv.long(), TypeError, "kv_TBC is torch.int64"),
        ("kv", lambda kv: kv[:, :, :8], ValueError, "equal last dimensions"),
        ("tokens", lambda x: x.float(), TypeError, "token_BSW is torch.float32; accepted is a torch.int32 or"),
        ("tokens", lambda x: x.tolist(), TypeError, "token_BSW is list"),
        ("tokens", lambda x: x[:, :5], ValueError, r"token_BSW \(2, 5, 15\); accepted are"),
        ("tokens", lambda x: x.to("meta"), ValueError, "token_BSW is on meta"),
        ("tokens", lambda x: x + 20, ValueError, r"token_BSW holds ids outside \[-1, 21\)"),
        ("tokens", lambda x: x - 1, ValueError, r"token_BSW holds ids outside \[-1, 21\)"),
        ("softmax_scale", lambda x: float("nan"), ValueError, "softmax_scale is nan"),
    ],
)
def test_bad_argument_of_the_oracle(case: Case, name: str, spoil, kind, match: str) -> None:
    arguments = {"q": case.q, "kv": case.kv, "tokens": case.tokens(), "softmax_scale": 1.0}
    arguments[name] = spoil(arguments[name])
    scale = arguments.pop("softmax_scale")
    with pytest.raises(kind, match=match):
        masked_attention(*arguments.values(), softmax_scale=scale)


def test_oracle_refuses_long_inputs_and_says_that_it_is_one() -> None:
    q, token = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.int32)
    masked_attention(q, torch.zeros(12_288, 1, 1), token, softmax_scale=1.0)
    with pytest.raises(
        ValueError, match="kv_TBC has 12289 keys; accepted are at most 12288: masked_attention is an oracle"
    ):
        masked_attention(q, torch.zeros(12_289, 1, 1), token, softmax_scale=1.0)


def test_refusals_leave_the_inputs_usable(case: Case) -> None:
    expected = case.run()
    refuse(replace(case, selection=case.selection.clamp(min=4)), ValueError, "cannot see")
    assert all(torch.equal(a, b) for a, b in zip(case.run(), expected, strict=True))
