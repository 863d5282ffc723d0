"""What is fuzzed in memory: settings, lengths, layouts, tensors, decoding states."""

from itertools import accumulate
from typing import Any, get_args

import hf_checkpoints
import torch
from fuzz import Target
from hypothesis import strategies as st
from odd import (
    SMALL,
    WORDS,
    changed_arguments,
    changed_tensor,
    values,
)

from mcore_dsa import (
    DsaGeometry,
    IndexerState,
    PoolLayout,
    compress_keys,
    expand_selection,
    fused_qk_topk_kpool,
    select_pools,
    select_pools_sharded,
    sparse_attention,
    sparse_attention_sharded,
)
from mcore_dsa.attention_work import attention_work
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.rows import RowPartition, partition_rows
from mcore_dsa.settings import Partition, Settings, read_settings
from mcore_dsa.work import best_partition, selection_work

REFUSAL = (TypeError, ValueError)
PARTITIONS = (*get_args(Partition), "diagonal", "", None, 3)


def _settings(environ: dict[str, str]) -> None:
    settings = read_settings(environ)
    assert isinstance(settings, Settings)
    assert settings.partition.value in get_args(Partition)
    for size in (settings.score_bytes, settings.attend_bytes, settings.store_bytes):
        assert 0 < size.value < 2**63
    assert settings.describe().keys() == read_settings({}).describe().keys()
    try:
        settings.raise_faults()
    except ValueError:
        assert settings.faults
    else:
        assert not settings.faults


_SETTING = st.one_of(
    st.sampled_from(
        (*WORDS, "ON", " zigzag ", "64MiB", "1 GiB", "0GiB", "9" * 19, "9" * 30 + "B", "٣", "1KIB ", "torch")
    ),
    st.text(max_size=12),
)
SETTINGS = st.dictionaries(st.sampled_from(sorted(read_settings({}).describe())), _SETTING)


@st.composite
def _lengths(draw: st.DrawFn) -> list[int]:
    return draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))


@st.composite
def _layout_calls(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    lengths = draw(_lengths())
    edges = torch.tensor([*accumulate(lengths, initial=0)], dtype=draw(st.sampled_from((torch.int32, torch.int64))))
    total, pool_size = sum(lengths), draw(st.integers(1, 5))
    sound: dict[Any, dict[str, Any]] = {
        PoolLayout.from_cu_seqlens: {"cu_seqlens": edges, "pool_size": pool_size, "num_tokens": total, "batch": 2},
        PoolLayout.dense: {"num_tokens": total, "pool_size": pool_size, "batch": 2},
        PoolLayout.from_padding_mask: {"valid_BT": torch.ones(2, 9, dtype=torch.bool), "pool_size": pool_size},
        PoolLayout.from_segments: {
            "segment_start_BN": edges[None, :-1],
            "segment_end_BN": edges[None, 1:],
            "num_tokens": total,
            "pool_size": pool_size,
            "first_pool_id": 3,
        },
    }
    make = draw(st.sampled_from(list(sound)))
    return make, draw(changed_arguments(sound[make]))


def _is_modest(call: tuple[Any, dict[str, Any]]) -> bool:
    """Not of a size that is sound and takes as much memory as it says."""
    lengths = [x for x in call[1].values() if isinstance(x, torch.Tensor) and x.dtype in (torch.int32, torch.int64)]
    return not any(bool(((x > SMALL) & (x <= 2**31)).any()) for x in lengths)


def _layout(call: tuple[Any, dict[str, Any]]) -> None:
    make, arguments = call
    layout = make(**arguments)
    held = layout.pool_token_BP
    assert held.shape == (layout.batch, layout.num_tokens // layout.pool_size)
    layout.bounds(torch.arange(-2, min(SMALL, layout.num_tokens + 2)))


@st.composite
def _plan_calls(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    context = draw(st.sampled_from((1, 2, 3)))
    lengths = [2 * context * length for length in draw(_lengths())]
    edges = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    sizes = {"pool_size": 4, "budget": 3, "partition": "zigzag", "tp_rank": 1, "tp_size": 2, "cp_rank": 0}
    sizes |= {"cp_size": context}
    arguments = draw(
        st.sampled_from(
            (
                (SelectionPlan.dense, {"rows": 2 * sum(lengths) // context, "batch": 2, **sizes}),
                (SelectionPlan.packed, {"cu_seqlens": edges, "cu_seqlens_padded": edges, **sizes}),
                (SelectionPlan.packed, {"cu_seqlens": edges, "cu_seqlens_padded": None, **sizes}),
            )
        )
    )
    changed = draw(changed_arguments(arguments[1]))
    return arguments[0], changed | {"partition": draw(st.sampled_from(PARTITIONS))}


def _plan(call: tuple[Any, dict[str, Any]]) -> None:
    make, arguments = call
    plan = make(**arguments)
    assert plan.own.rows == plan.partition.rows_of(plan.rank)
    assert plan.key_order_T is None or bool(
        (plan.key_token_T.sort().values == torch.arange(plan.layout.num_tokens)).all()
    )


@st.composite
def _packs(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a PackedSeqParams, and the rows of the call."""
    lengths = draw(_lengths())
    edges = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
    if draw(st.booleans()):
        edges = torch.cat([edges, torch.full((2,), -1, dtype=torch.int32)])
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    fields: dict[str, Any] = {"qkv_format": "thd", **dict.fromkeys(names, edges)}
    fields |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths), "local_cp_size": None}
    if draw(st.booleans()):
        fields = draw(changed_arguments(fields))
    else:
        # Both of a pair, which alone differ from each other and are refused for it.
        for suffix in draw(st.sampled_from((("",), ("_padded",), ("", "_padded")))):
            odd = draw(st.one_of(changed_tensor(edges), st.none(), values))
            fields |= {f"cu_seqlens_q{suffix}": odd, f"cu_seqlens_kv{suffix}": odd}
    return {"fields": fields, "rows": draw(st.sampled_from((sum(lengths), sum(lengths), 0, 3)))}


def _pack(case: dict[str, Any]) -> None:
    from megatron.core.packed_seq_params import PackedSeqParams

    from mcore_dsa.megatron.batch import plan_of

    packed = PackedSeqParams()
    vars(packed).update(case["fields"])
    sizes: dict[str, Any] = {"pool_size": 4, "budget": 3, "partition": "contiguous"}
    sizes |= {"tp_rank": 0, "tp_size": 1, "cp_rank": 0, "cp_size": 1}
    plan = plan_of(torch.zeros(case["rows"], 1, 2, 3), packed, **sizes)
    assert plan.layout.num_tokens == case["rows"]


@st.composite
def _row_calls(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    lengths = draw(_lengths())
    geometry = DsaGeometry.from_config(hf_checkpoints.TINY)
    rows: dict[str, Any] = {"num_rows": sum(lengths), "group_size": 3}
    sound: dict[Any, dict[str, Any]] = {
        RowPartition.replicated: rows,
        RowPartition.contiguous: rows,
        RowPartition.zigzag: rows,
        selection_work: {
            "lengths": lengths,
            "geometry": geometry,
            "group_size": 2,
            "partition": draw(st.sampled_from(PARTITIONS)),
            "context_size": 1,
            "elem_bytes": 2,
            "kernels": draw(st.sampled_from(("torch", "triton"))),
            "score_bytes": 2**20,
        },
        attention_work: {
            "lengths": lengths,
            "geometry": geometry,
            "group_size": 2,
            "partition": draw(st.sampled_from(PARTITIONS)),
            "shard": draw(st.sampled_from(("heads", "rows", "both", None))),
            "context_size": 1,
            "elem_bytes": 2,
            "kernels": draw(st.sampled_from(("torch", "triton"))),
            "attend_bytes": 2**20,
        },
        best_partition: {"lengths": lengths, "geometry": geometry, "group_size": 2, "context_size": 1},
        partition_rows: {
            "kind": draw(st.sampled_from(PARTITIONS)),
            "num_rows": sum(lengths),
            "group_size": 3,
            "lengths": lengths,
            "pool_size": 4,
            "budget": 2,
        },
    }
    make = draw(st.sampled_from(list(sound)))
    return make, draw(changed_arguments(sound[make]))


def _call(call: tuple[Any, dict[str, Any]]) -> None:
    make, arguments = call
    make(**arguments)


def _positional(call: tuple[Any, dict[str, Any]]) -> None:
    """Tensors and what stands with them are positional in every function."""
    make, arguments = call
    first = {name: value for name, value in arguments.items() if name in _POSITIONAL}
    make(*first.values(), **{name: value for name, value in arguments.items() if name not in first})


_POSITIONAL = ("key", "gate", "ape", "q", "weights", "pool_key", "latent", "selection", "layout", "position")


@st.composite
def _function_calls(draw: st.DrawFn) -> tuple[Any, dict[str, Any]]:
    tokens, batch, heads, dim, pool = 13, 2, 2, 3, 4
    generator = torch.Generator().manual_seed(draw(st.integers(0, 3)))
    q = torch.randn(tokens, batch, heads, dim, generator=generator)
    weights, key, ape = q[..., 0], q[:, :, 0], torch.zeros(pool, dim)
    pools = torch.randn(tokens // pool, batch, dim, generator=generator)
    selection = torch.full((batch, tokens, 2), -1, dtype=torch.int32)
    selection[:, 3:, 0] = 0
    where: dict[str, Any] = {"layout": PoolLayout.dense(tokens, pool_size=pool, batch=batch)}
    where["position"] = torch.arange(tokens)
    scoring = {"q": q, "weights": weights, "pool_key": pools, **where, "budget": 2, "score_bytes": 2**24}
    attending = {"q": q, "latent": key, "selection": selection, **where, "softmax_scale": 0.5, "attend_bytes": 2**24}
    attending["always_select_tail"] = True
    shared = {"query_shard_group": None, "partition": RowPartition.contiguous(tokens, 1)}
    sound: dict[Any, dict[str, Any]] = {
        compress_keys: {"key": key, "gate": key, "ape": ape, "layout": where["layout"]},
        select_pools: {**scoring, "use_relu": True},
        select_pools_sharded: {**scoring, **shared, "overlap": True},
        expand_selection: {"selection": selection, **where, "always_select_tail": True},
        sparse_attention: attending,
        sparse_attention_sharded: {**attending, **shared},
    }
    make = draw(st.sampled_from(list(sound)))
    return make, draw(changed_arguments(sound[make]))


@st.composite
def _fused_calls(draw: st.DrawFn) -> dict[str, Any]:
    tokens, batch, heads, dim, pool = 12, 2, 2, 3, 4
    q = torch.randn(tokens, batch, heads, dim, generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(tokens, dtype=torch.int32)
    bounded = draw(st.booleans())
    sound: dict[str, Any] = {
        "q": q,
        "k": q[:, :, 0],
        "weights": q[..., 0],
        "index_topk": 8,
        "mask": None if bounded else torch.ones(tokens, tokens, dtype=torch.bool).triu(1),
        "use_relu": True,
        "varlen_starts": starts if bounded else None,
        "varlen_ends": torch.arange(1, tokens + 1) if bounded else None,
        "pool_size": pool,
        "gate_score": q[:, :, 1],
        "ape": torch.zeros(pool, dim),
        "always_select_tail": True,
        "cu_seqlens_kv": draw(st.sampled_from((None, torch.tensor([0, tokens]), torch.tensor([0, 5, tokens])))),
        "key_positions": None,
        "fp8_indexer": False,
    }
    return draw(changed_arguments(sound))


def _fused(arguments: dict[str, Any]) -> None:
    fused_qk_topk_kpool(**arguments)


@st.composite
def _sessions(draw: st.DrawFn) -> list[tuple[str, dict[str, Any]]]:
    """A state and what is done with it, step by step, sound or not."""
    batch, heads, dim, pool = 2, 2, 3, 3
    make: dict[str, Any] = {
        "ape_JD": torch.zeros(pool, dim),
        "batch": batch,
        "capacity": 20,
        "dtype": torch.float32,
        "rewind_window": 4,
    }
    steps = [("make", draw(changed_arguments(make)) if draw(st.integers(0, 4)) == 0 else make)]
    for _ in range(draw(st.integers(0, 6))):
        rows = draw(st.integers(0, 8))
        q = torch.randn(rows, batch, heads, dim, generator=torch.Generator().manual_seed(rows))
        valid = draw(st.sampled_from((None, torch.ones(batch, rows, dtype=torch.bool))))
        sound = {
            "append": {"key_SBD": q[:, :, 0], "gate_SBD": q[:, :, 1], "valid_BS": valid},
            "select": {"q_SBHD": q, "weights_SBH": q[..., 0], "valid_BS": valid, "budget": 2, "score_bytes": 2**24},
            "rewind": {"length_B": torch.tensor([rows, rows])},
            "take": {"sample_B": torch.tensor([1, 0])},
            "reset": {},
        }
        name = draw(st.sampled_from(("append", "append", *sound)))
        odd = name != "reset" and draw(st.booleans())
        steps.append((name, draw(changed_arguments(sound[name])) if odd else sound[name]))
    return steps


def _session(steps: list[tuple[str, dict[str, Any]]]) -> None:
    state = IndexerState(**steps[0][1])
    for name, arguments in steps[1:]:
        before = state.length_B
        try:
            found = getattr(state, name)(**arguments)
        except REFUSAL:
            assert torch.equal(state.length_B, before)
            continue
        state = found if name == "take" else state
        assert bool(((state.length_B >= 0) & (state.length_B <= state.capacity)).all())


TARGETS = (
    Target("settings", SETTINGS, _settings, (), 24),
    Target("layouts", _layout_calls().filter(_is_modest), _layout, REFUSAL, 12),
    Target("plans", _plan_calls().filter(_is_modest), _plan, REFUSAL, 6),
    Target("packs", _packs(), _pack, REFUSAL, 8),
    Target("rows", _row_calls(), _call, REFUSAL, 8),
    Target("functions", _function_calls(), _positional, REFUSAL, 8),
    Target("fused", _fused_calls(), _fused, REFUSAL, 5),
    Target("states", _sessions(), _session, REFUSAL, 4),
)
