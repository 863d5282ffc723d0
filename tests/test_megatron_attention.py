"""The core attention under Megatron's call contract: recomputation, rows without tokens, and what it refuses."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attend_cases import assert_as_exact_as_the_oracle
from harness import megatron_ranks
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import MLATransformerConfig
from models import (
    BATCH,
    OFF,
    ON,
    POOL,
    ROWS,
    SIZES,
    TOPK,
    assert_equal,
    attentions,
    config,
    gpt,
    taken_selections,
    tokens,
)
from torch import Tensor

from mcore_dsa.functions import masked_attention
from mcore_dsa.kpool import PoolLayout, expand_selection
from mcore_dsa.megatron import KPoolDSATransformerConfig, KPoolDSAttention
from mcore_dsa.settings import ATTEND_BYTES_VARIABLE, SCORE_BYTES_VARIABLE, STORE_VARIABLE

LATENT, HIDDEN, RANK = SIZES["kv_lora_rank"], SIZES["hidden_size"], SIZES["q_lora_rank"]
HEADS = 3
SCALE = 0.25

RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "core_attn": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "mla_up_proj": {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mla_up_proj"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}
# Executions of each layer's core attention in one forward and backward.
EXECUTIONS = {"none": [1, 1], "core_attn": [2, 2], "mla_up_proj": [2, 2], "full": [2, 2], "block": [2, 1]}


def recomputed(dropout: float) -> dict[str, Any]:
    """For each way of recomputing, gradients of two forwards that are both outstanding before the first backward."""
    results = {}
    for way, options in RECOMPUTE.items():
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11)
        model = gpt(config(hidden_dropout=dropout, **options))
        with taken_selections() as taken:
            losses = [model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean() for ids in (tokens(0), tokens(1))]
            forward = len(taken)
            for loss in losses:
                loss.backward()
        named = model.named_parameters()
        results[way] = {
            "gradients": {name: p.grad for name, p in named if p.requires_grad},
            "losses": [loss.detach() for loss in losses],
            "first": taken[:forward],
            "again": taken[forward:],
            "rows": [layer.counters.rows for layer in attentions(model)],
        }
    return results


@pytest.mark.parametrize(("dropout", "store"), [(0.0, "1"), (0.2, "1"), (0.2, "0")])
def test_recomputation_changes_no_bit(dropout: float, store: str) -> None:
    for results in megatron_ranks(recomputed, 2, dropout, tp=2, env=ON | {STORE_VARIABLE: store}):
        plain = results["none"]
        assert len(plain["gradients"]) > 10
        assert all(bool(grad.abs().max() > 0) for grad in plain["gradients"].values())
        assert not torch.equal(plain["first"][0], plain["first"][2])
        for way, result in results.items():
            selections = [1, 1] if store == "1" else EXECUTIONS[way]
            assert result["rows"] == [2 * count * BATCH * ROWS // 2 for count in selections], way
            for part in ("gradients", "losses", "first"):
                assert_equal(result[part], plain[part], f"{way} {part}")
            # Each recompute uses the selection of its own forward.
            forwards = {layer: [plain["first"][layer], plain["first"][2 + layer]] for layer in (0, 1)}
            wanted = [forwards[layer][micro] for micro in (0, 1) for layer in (1, 0) if EXECUTIONS[way][layer] == 2]
            assert_equal(result["again"], wanted, f"{way} recomputed")


def with_and_without_grad() -> dict[str, Any]:
    model = gpt(config())
    ids = tokens()[:, :-1]
    results = []
    for enabled in (True, False, True):
        with torch.set_grad_enabled(enabled), taken_selections() as taken:
            results.append([model(ids, None, None).detach(), *taken])
    model.eval()
    with torch.inference_mode(), taken_selections() as taken:
        results.append([model(ids, None, None).clone(), *[selection.clone() for selection in taken]])
    return {"results": results}


@pytest.mark.parametrize("env", [OFF, ON])
def test_a_forward_selects_the_same_with_and_without_gradients(env: dict[str, str]) -> None:
    for rank in megatron_ranks(with_and_without_grad, 2, tp=2, env=env):
        first, *others = rank["results"]
        assert len(first) == 3
        for other in others:
            assert_equal(other, first)


class Core:
    """A core attention alone, with random inputs as `AbsorbedMLASelfAttention` passes them at TP 1."""

    def __init__(self, rows: int, *, seed: int = 0, **overrides: Any) -> None:
        self.module = core_attention(config(**overrides))
        for parameter in self.module.parameters():
            parameter.data.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
        generator = torch.Generator().manual_seed(seed)
        shapes = {"query": (HEADS, LATENT), "key": (1, LATENT), "x": (HIDDEN,), "qr": (RANK,)}
        self.tensors = {name: torch.randn(rows, BATCH, *shape, generator=generator) for name, shape in shapes.items()}
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self.probe = torch.randn(rows, BATCH, HEADS * LATENT, generator=generator)

    def run(self, **changes: Any) -> Tensor:
        arguments: dict[str, Any] = {"value": None, "attention_mask": None, "up_v_weight": None, **self.tensors}
        query, key = arguments.pop("query"), arguments.pop("key")
        return self.module(changes.pop("query", query), key, **{**arguments, **changes})

    def gradients(self, output: Tensor) -> dict[str, Tensor | None]:
        (output * self.probe).sum().backward()
        return {name: tensor.grad for name, tensor in self.tensors.items()}


def core_attention(cfg: Any, **overrides: Any) -> KPoolDSAttention:
    arguments = {"layer_number": 1, "attn_mask_type": AttnMaskType.causal, "softmax_scale": SCALE, **overrides}
    return KPoolDSAttention(cfg, **arguments)


def dense(core: Core, selection: Tensor, tail: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The oracle's output over the selected tokens, and its gradients of query and key."""
    query, key = (core.tensors[name].detach().to(dtype).requires_grad_() for name in ("query", "key"))
    rows = len(query)
    layout = PoolLayout.dense(rows, pool_size=POOL, batch=BATCH)
    token_BSW = expand_selection(selection, layout, torch.arange(rows), always_select_tail=tail)
    output = masked_attention(query, key.squeeze(2), token_BSW, softmax_scale=SCALE).flatten(2)
    (output * core.probe).sum().backward()
    assert query.grad is not None
    assert key.grad is not None
    return output.detach(), query.grad, key.grad


def attended() -> list[tuple[int, bool, int]]:
    """Checked inside: output and gradients against the oracle, rows without tokens among them."""
    seen = []
    for rows in (1, 3, 4, 5, TOPK, ROWS, 131):
        for tail in (True, False):
            core = Core(rows, seed=rows, dsa_indexer_kpool_always_select_tail=tail)
            with taken_selections() as taken:
                output = core.run()
            gradients = core.gradients(output)
            oracle, exact = (dense(core, taken[0], tail, dtype) for dtype in (torch.float32, torch.float64))
            got = (output.detach(), gradients["query"], gradients["key"])
            assert_as_exact_as_the_oracle(got, oracle, exact)
            # Nothing flows into the indexer's inputs.
            assert gradients["x"] is None
            assert gradients["qr"] is None
            if rows <= TOPK:
                visible = torch.arange(rows) + 1
                pools = (taken[0] >= 0).sum(-1)
                assert torch.equal(pools, (visible // POOL).expand(BATCH, -1))
            empty = slice(0, 0 if tail else min(rows, POOL - 1))
            assert not output[empty].any()
            assert not gradients["query"][empty].any()
            assert output[empty.stop :].abs().flatten(1).amax(1).bool().all()
            seen.append((rows, tail, len(output[empty])))
    return seen


def test_output_and_gradients_are_those_of_the_oracle_and_zero_where_nothing_is_selected() -> None:
    (seen,) = megatron_ranks(attended, 1)
    assert {(rows, empty) for rows, tail, empty in seen if not tail} >= {(1, 1), (3, 3), (4, 3), (131, 3)}
    assert all(empty == 0 for _, tail, empty in seen if tail)


def refusals() -> dict[str, str]:
    said = {}

    def record(name: str, error: type[Exception], call: Any) -> None:
        with pytest.raises(error) as raised:
            call()
        said[name] = str(raised.value)

    core = Core(8)
    for mask in (AttnMaskType.padding, AttnMaskType.no_mask, AttnMaskType.padding_causal, AttnMaskType.arbitrary):
        record(f"mask {mask.name}", ValueError, lambda mask=mask: core.run(attn_mask_type=mask))
    record("value", ValueError, lambda: core.run(value=core.tensors["key"]))
    record("query", ValueError, lambda: core.run(query=core.tensors["query"].flatten(2)))
    bidirectional = core_attention(config(), attn_mask_type=AttnMaskType.padding)
    core.module = bidirectional
    record("built with a mask", ValueError, core.run)
    record("cross", ValueError, lambda: core_attention(config(), attention_type="cross"))
    stock = MLATransformerConfig(num_layers=1, hidden_size=48, num_attention_heads=4)
    record("config", TypeError, lambda: core_attention(stock))
    # A core that Megatron built once and dropped has no scale, and no way to be called by accident.
    dropped = core_attention(config(), softmax_scale=None)
    assert dropped.softmax_scale is None
    groups = ProcessGroupCollection.use_mpu_process_groups()
    assert core_attention(config(), pg_collection=groups).tp_group is groups.tp
    assert core_attention(config(), pg_collection=SimpleNamespace(tp=groups.tp)).tp_group is groups.tp
    return said


def test_calls_that_are_not_plain_causal_attention_are_refused_by_name() -> None:
    (said,) = megatron_ranks(refusals, 1)
    for name in ("padding", "no_mask", "padding_causal", "arbitrary"):
        assert said[f"mask {name}"].startswith(
            f"attn_mask_type is AttnMaskType.{name}; accepted are AttnMaskType.causal"
        )
    assert said["built with a mask"].startswith("attn_mask_type is AttnMaskType.padding; accepted")
    assert "value is Tensor" in said["value"]
    assert f"query has shape (8, {BATCH}, {HEADS * LATENT})" in said["query"]
    assert said["cross"] == "attention_type is 'cross'; accepted is 'self'"
    assert said["config"] == f"config is a MLATransformerConfig; accepted is a {KPoolDSATransformerConfig.__name__}"


def too_small() -> str:
    model = gpt(config(num_layers=1))
    ids = tokens()
    with pytest.raises(ValueError, match=" is 1; accepted") as raised:
        model(ids[:, :-1], None, None)
    return str(raised.value)


@pytest.mark.parametrize("variable", [SCORE_BYTES_VARIABLE, ATTEND_BYTES_VARIABLE])
def test_a_byte_budget_that_nothing_fits_raises_on_every_rank(variable: str) -> None:
    one, other = megatron_ranks(too_small, 2, tp=2, env={**ON, variable: "1"}, timeout=45.0)
    assert one == other
    assert ("score" if variable == SCORE_BYTES_VARIABLE else "attend") in one.lower()
