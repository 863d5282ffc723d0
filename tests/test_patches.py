"""Stock Megatron-Core runs here with the patches, each patch has its use, and none does more than it says."""

import importlib.metadata
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import RanksFailed, megatron_ranks, run_ranks
from mcore_dsa.patches import MissingSymbolError, apply_patches, cpu, recompute, rotary
from models import ROWS, VOCAB, Trainer, stock_config, stock_gpt, tokens

from mcore_dsa import patches

ROTARY = "get_pos_emb_on_this_cp_rank"
FRESH = "DistributedOptimizer.state_dict"
SHARED_STEP = "DistributedOptimizer.load_state_dict"
STEP_KEY = "DistributedOptimizer._set_main_param_and_optimizer_states"
EVERY_DEVICE = {
    ROTARY,
    FRESH,
    SHARED_STEP,
    STEP_KEY,
    "tensor_parallel.checkpoint",
    "absorbed_mla.apply_rotary_pos_emb",
    "RotaryEmbedding.get_rotary_seq_len",
    "absorbed_mla.TELinear",
    "hybrid_block.TENorm",
}
EPS = torch.finfo(torch.float32).eps


def train(jitter: float, sizes: dict[str, int]) -> list[tuple[float, float]]:
    model = stock_gpt(stock_config(**sizes))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data *= 1 + jitter * torch.randn(parameter.shape, generator=generator)
    trainer = Trainer(model)
    return [trainer.update([tokens(step)]) for step in range(3)]


def test_stock_dsa_trains_and_tensor_parallelism_changes_rounding_only() -> None:
    (alone,) = megatron_ranks(train, 1, 0.0, {})
    (jittered,) = megatron_ranks(train, 1, EPS / 2, {})
    split, other = megatron_ranks(train, 2, 0.0, {"tensor_model_parallel_size": 2}, tp=2)
    assert split == other
    assert alone[2][0] < alone[0][0]
    for step in range(3):
        for here, moved, there in zip(alone[step], jittered[step], split[step], strict=True):
            # TP rounds every partial sum otherwise. One rounding of every weight shows what a rounding costs here; sums
            # of 96 terms and fewer carry about sqrt(96) of them.
            assert abs(there - here) <= 10 * abs(moved - here) + 10 * EPS * here


def train_and_save(folder: str, sharding: str, sizes: dict[str, int]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    trainer = Trainer(stock_gpt(stock_config(**sizes)))
    for step in range(2):
        trainer.update([tokens(step)])
    trainer.save(folder, sharding)
    return [trainer.update([tokens(step)]) for step in (2, 3)], trainer.parameters()


def load_and_train(folder: str, sharding: str, sizes: dict[str, int]) -> tuple[list[Any], dict[str, torch.Tensor]]:
    trainer = Trainer(stock_gpt(stock_config(**sizes)))
    trainer.load(folder, sharding)
    return [trainer.update([tokens(step)]) for step in (2, 3)], trainer.parameters()


@pytest.mark.parametrize("sharding", ["fully_reshardable", "dp_reshardable"])
def test_distributed_optimizer_resumes_exactly(tmp_path: Path, sharding: str) -> None:
    saved = megatron_ranks(train_and_save, 2, str(tmp_path), sharding, {})
    resumed = megatron_ranks(load_and_train, 2, str(tmp_path), sharding, {}, seed=99)
    for (steps, parameters), (resumed_steps, resumed_parameters) in zip(saved, resumed, strict=True):
        assert steps == resumed_steps
        assert parameters.keys() == resumed_parameters.keys()
        assert all(torch.equal(value, resumed_parameters[name]) for name, value in parameters.items())


def test_what_the_optimizer_patches_mend(tmp_path: Path) -> None:
    """And, in passing, that a checkpoint of one rank continues on two pipeline stages with tied embeddings."""
    folder, sharding = str(tmp_path), "fully_reshardable"
    ((steps, _),) = megatron_ranks(train_and_save, 1, folder, sharding, {})
    for name, error in ((FRESH, r"assert len\(steps\) == 1"), (STEP_KEY, "KeyError: 'step'")):
        with pytest.raises(RanksFailed, match=error):
            megatron_ranks(load_and_train, 1, folder, sharding, {}, without_patches=[name])
    ((right, _),) = megatron_ranks(load_and_train, 1, folder, sharding, {})
    ((wrong, _),) = megatron_ranks(load_and_train, 1, folder, sharding, {}, without_patches=[SHARED_STEP])
    assert right == steps
    assert wrong[0][0] == steps[0][0]
    # 2.1e-2 apart. With the patch they are equal (above), so that no rounding is taken for the defect.
    assert abs(wrong[1][0] - steps[1][0]) > 1e-2

    _, (last_stage, _) = megatron_ranks(
        load_and_train, 2, folder, sharding, {"pipeline_model_parallel_size": 2}, pp=2, seed=99
    )
    for (loss, norm), (staged_loss, staged_norm) in zip(steps, last_stage, strict=True):
        # The stages compute what one rank does; only the norm is summed otherwise, and with it the weights are clipped.
        assert abs(staged_loss - loss) <= 100 * EPS * loss
        assert abs(staged_norm - norm) <= 100 * EPS * norm


def forward_loss(sizes: dict[str, int]) -> float:
    model = stock_gpt(stock_config(**sizes))
    trainer = Trainer(model)
    return trainer.update([tokens()])[0]


def test_nope_under_context_parallelism_runs_with_the_patch_only() -> None:
    sizes = {"context_parallel_size": 2}
    (alone,) = megatron_ranks(forward_loss, 1, {})
    split = megatron_ranks(forward_loss, 2, sizes, cp=2)
    # Each rank reports the mean over its own half of the rows; the forward has no cross-rank sum but theirs.
    assert abs(sum(split) / 2 - alone) <= 10 * EPS * alone
    with pytest.raises(RanksFailed, match=r"get_pos_emb_on_this_cp_rank(.|\n)*RuntimeError"):
        megatron_ranks(forward_loss, 2, sizes, cp=2, without_patches=[ROTARY])


def upstream_rows() -> tuple[list[torch.Tensor], str]:
    """What Megatron's own function does once its way through pinned memory is out of the way, that is on a GPU."""
    from megatron.core.models.common.embeddings import rope_utils

    vars(rope_utils)["torch"] = SimpleNamespace(tensor=lambda data, device, pin_memory: torch.tensor(data))
    groups = [SimpleNamespace(size=lambda: 3, rank=lambda rank=rank: rank) for rank in range(3)]
    tables = [rope_utils.get_pos_emb_on_this_cp_rank(torch.arange(24.0).view(12, 1, 2), 0, group) for group in groups]
    try:
        rope_utils.get_pos_emb_on_this_cp_rank(torch.empty(12, 1, 0), 0, groups[0])
    except RuntimeError as error:
        return tables, str(error)
    return tables, ""


def test_upstream_cuts_tables_alike_and_fails_for_nope_on_a_gpu_too() -> None:
    ((tables, error),) = megatron_ranks(upstream_rows, 1, without_patches=[ROTARY])
    for rank, table in enumerate(tables):
        group = SimpleNamespace(size=lambda: 3, rank=lambda rank=rank: rank)
        assert torch.equal(table, rotary.rows_of_cp_rank(torch.arange(24.0).view(12, 1, 2), 0, group))
    assert "cannot reshape tensor of 0 elements" in error


@pytest.mark.parametrize("width", [0, 2, 8])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_rows_of_cp_rank_are_a_chunk_and_its_mirror(cp: int, width: int) -> None:
    table = torch.randn(12 * cp, 1, 1, width)
    chunks = table.chunk(2 * cp) if width else [torch.empty(6, 1, 1, 0)] * 2 * cp
    for rank in range(cp):
        group = SimpleNamespace(size=lambda: cp, rank=lambda rank=rank: rank)
        mine = rotary.rows_of_cp_rank(table, 0, group)
        assert torch.equal(mine, torch.cat((chunks[rank], chunks[2 * cp - 1 - rank])))
    with pytest.raises(ValueError, match="the length of pos_emb on dim 0 is 7; accepted is a multiple of"):
        rotary.rows_of_cp_rank(torch.zeros(7, 2), 0, SimpleNamespace(size=lambda: 2, rank=lambda: 0))


def hybrid_gradients() -> tuple[float, list[str]]:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_dsa_module_spec_for_backend
    from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    from mcore_dsa.megatron.backend import default_backend

    cfg = stock_config(num_layers=4)
    backend = default_backend(cfg)
    norm = backend.layer_norm(rms_norm=True)
    attention = TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=get_dsa_module_spec_for_backend(cfg, backend=backend),
        self_attn_bda=get_bias_dropout_add,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=norm, mlp=get_mlp_module_spec_for_backend(backend), mlp_bda=get_bias_dropout_add
    )
    stack = HybridStackSubmodules(
        dsa_layer=ModuleSpec(TransformerLayer, submodules=attention), mlp_layer=ModuleSpec(MLPLayer, submodules=mlp)
    )
    model = HybridModel(
        cfg,
        ModuleSpec(HybridStack, submodules=stack),
        vocab_size=VOCAB,
        max_sequence_length=ROWS,
        hybrid_layer_pattern="D-D-",
        position_embedding_type="none",
    )
    ids = tokens()
    loss = model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()
    loss.backward()
    untouched = [
        name
        for name, value in model.named_parameters()
        if value.grad is None or not value.grad.isfinite().all() or not value.grad.any()
    ]
    return loss.item(), untouched


def test_hybrid_model_builds_and_every_trained_parameter_has_a_gradient() -> None:
    ((loss, untouched),) = megatron_ranks(hybrid_gradients, 1)
    assert 0 < loss < 10
    # Without its loss the indexer has no gradient, and everything else has one.
    assert all(".indexer." in name for name in untouched)
    with pytest.raises(RanksFailed, match="hybrid_block"):
        megatron_ranks(hybrid_gradients, 1, without_patches=["hybrid_block.TENorm"])


def random_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel import checkpoint, get_cuda_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.tensor_parallel.random import get_data_parallel_rng_tracker_name

    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    default = torch.rand(4)
    before = torch.get_rng_state()
    tracker = get_cuda_rng_tracker()
    with tracker.fork():
        own = torch.rand(4)
    with tracker.fork(get_data_parallel_rng_tracker_name()):
        shared = torch.rand(4)
    restored = torch.equal(before, torch.get_rng_state())

    def gradient(recompute: bool) -> torch.Tensor:
        x = torch.ones(1000, requires_grad=True)
        model_parallel_cuda_manual_seed(5)
        twice = checkpoint(drop_twice, False, x) if recompute else drop_twice(x)
        torch.rand(3)
        twice.sum().backward()
        assert x.grad is not None
        return x.grad

    same = torch.equal(gradient(True), gradient(False))
    return {"default": default, "own": own, "shared": shared, "restored": restored, "same": same, "heard": heard}


def drop_twice(x: torch.Tensor) -> torch.Tensor:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    once = torch.nn.functional.dropout(x, 0.5)
    with get_cuda_rng_tracker().fork():
        return torch.nn.functional.dropout(once, 0.5)


def test_random_states_are_tracked_and_recomputed_on_the_cpu_generator() -> None:
    one, two = megatron_ranks(random_states, 2, tp=2, seed=7)
    assert torch.equal(one["default"], torch.rand(4, generator=torch.Generator().manual_seed(7)))
    assert torch.equal(one["default"], two["default"])
    assert torch.equal(one["shared"], two["shared"])
    assert not torch.equal(one["own"], two["own"])
    for rank in (one, two):
        assert rank["restored"]
        assert rank["same"]
        assert rank["heard"] == []


def apply_twice() -> tuple[patches.PatchReport, bool, dict[str, bool]]:
    zeros, manual_seed, tensor_type = torch.zeros, torch.cuda.manual_seed, torch.Tensor.type
    report = patches.apply()
    from megatron.core.optimizer import clip_grads

    code = clip_grads.get_grad_norm_fp32.__code__
    again = patches.apply() is report and clip_grads.get_grad_norm_fp32.__code__ is code
    try:
        torch.zeros(1, device="cuda")
        refuses = False
    except (AssertionError, RuntimeError):
        refuses = True
    untouched = {
        "zeros": torch.zeros is zeros,
        "manual_seed": torch.cuda.manual_seed is manual_seed,
        "type": torch.Tensor.type is tensor_type and torch.ones(1).type() == "torch.FloatTensor",
        "cuda is refused": refuses,
    }
    return report, again, untouched


def test_apply_is_idempotent_reports_and_leaves_torch_alone() -> None:
    ((report, again, untouched),) = run_ranks(apply_twice, 1)
    assert again
    assert all(untouched.values()), untouched
    assert report.skipped == {}
    assert report.replaced == tuple(patch.name for patch in patches.PATCHES)
    assert len(set(report.replaced)) == len(report.replaced)


def stand_ins() -> list[Any]:
    """Everything that a patch for the CPU would have replaced."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as writer
    from megatron.core.tensor_parallel import random

    codes = [cpu.function_at(patch.symbols[0]).__code__ for patch in cpu.LITERALS]
    calls = [torch.cuda.current_device, torch.cuda.current_stream, torch.cuda.synchronize, torch.Tensor.cuda]
    return [*codes, *calls, random.torch, random._set_cuda_rng_state, writer._results_queue]


def apply_where_cuda_is_available() -> tuple[patches.PatchReport, list[bool]]:
    torch.cuda.is_available = lambda: True
    before = stand_ins()
    report = patches.apply()
    return report, [here is there for here, there in zip(before, stand_ins(), strict=True)]


def test_nothing_stands_in_for_cuda_where_cuda_is_available() -> None:
    ((report, untouched),) = run_ranks(apply_where_cuda_is_available, 1)
    assert all(untouched)
    assert set(report.replaced) == EVERY_DEVICE
    assert set(report.skipped) == {patch.name for patch in (*cpu.PATCHES, *recompute.PATCHES)}
    assert set(report.skipped.values()) == {"CUDA is available"}


def apply_with_a_symbol_missing() -> tuple[str, list[bool]]:
    from megatron.core.optimizer import clip_grads

    before = stand_ins()
    count = vars(clip_grads).pop("count_zeros_fp32")
    try:
        patches.apply()
    except MissingSymbolError as error:
        message = str(error)
    clip_grads.count_zeros_fp32 = count
    return message, [here is there for here, there in zip(before, stand_ins(), strict=True)]


def test_missing_symbol_is_named_and_nothing_is_changed() -> None:
    ((message, untouched),) = run_ranks(apply_with_a_symbol_missing, 1)
    assert "megatron.core.optimizer.clip_grads:count_zeros_fp32" in message
    assert f"megatron-core is {importlib.metadata.version('megatron-core')}" in message
    assert all(untouched)


def apply_to_a_patched_megatron() -> tuple[patches.PatchReport, list[str]]:
    """What is patched already stands for a Megatron in which each defect is mended."""
    patches.apply()
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("mcore_dsa.patches")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return apply_patches(patches.PATCHES), heard


def test_what_upstream_has_mended_is_skipped_with_a_log_line() -> None:
    ((report, heard),) = run_ranks(apply_to_a_patched_megatron, 1)
    mended = {patch.name for patch in cpu.LITERALS} | {ROTARY, FRESH, SHARED_STEP, STEP_KEY, "absorbed_mla.TELinear"}
    for name in mended:
        assert report.skipped[name].startswith("mended upstream")
        assert f"skipped {name}: {report.skipped[name]}" in heard
    assert report.skipped["filesystem_async._results_queue"] == "the queue exists already"


def apply_where_transformer_engine_is_installed() -> tuple[patches.PatchReport, bool]:
    from megatron.core.extensions import transformer_engine
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.transformer.experimental_attention_variant import absorbed_mla

    transformer_engine.HAVE_TE = True
    linear = absorbed_mla.TELinear = type("TELinear", (), {})
    norm = hybrid_block.TENorm
    return patches.apply(), absorbed_mla.TELinear is linear and hybrid_block.TENorm is norm


def test_transformer_engines_own_classes_win() -> None:
    ((report, untouched),) = run_ranks(apply_where_transformer_engine_is_installed, 1)
    assert untouched
    assert set(report.skipped) == {"absorbed_mla.TELinear", "hybrid_block.TENorm"}
    assert all("Transformer Engine is installed" in why for why in report.skipped.values())
