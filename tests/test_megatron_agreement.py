"""What the module agrees on with the other ranks, what makes it agree again, and what backward keeps."""

import contextlib
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from models import BATCH, OFF, ON, POOL, ROWS, TOPK, attentions, config, gpt, tokens, under_each

from mcore_dsa.agreement import SelectionContract
from mcore_dsa.backends import Choice
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.megatron import KPoolDSATransformerConfig, attention, batch
from mcore_dsa.settings import KERNELS_VARIABLE, OVERLAP_VARIABLE, PARTITION_VARIABLE

TIMEOUT_S = 45.0


def refuse(*_args: Any) -> str:
    raise RuntimeError("a score depends on its place in the tile")


def flip_a_weight(indexer: torch.nn.Module) -> None:
    with torch.no_grad():
        indexer.linear_wk.weight[0, 0] += 1


CHANGES: dict[str, tuple[Any, str]] = {
    "numbers below the normal range": (
        lambda _: torch.set_flush_denormal(True),
        "backend is .* on ranks \\[0\\], .* on ranks \\[1\\]; accepted is the same on every rank",
    ),
    "a probe that fails with other threads": (
        lambda _: (torch.set_num_threads(2), setattr(TorchBackend, "fingerprint", staticmethod(refuse))),
        "rank 1: a score depends on its place in the tile",
    ),
    "weights": (flip_a_weight, "weights is '[0-9a-f]{16}' on ranks \\[0\\]"),
    "the tail of the configuration": (
        lambda indexer: setattr(indexer.config, "dsa_indexer_kpool_always_select_tail", False),
        "dsa_indexer_kpool_always_select_tail is 'True' on ranks \\[0\\], 'False' on ranks \\[1\\]",
    ),
    "the epsilon of a norm": (
        lambda indexer: setattr(indexer.k_norm, "eps", 1.0),
        "dsa_indexer_k_norm_epsilon is '1e-06' on ranks \\[0\\], '1.0' on ranks \\[1\\]",
    ),
    "products of less than fp32": (
        lambda _: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        "products is 'fp32 in ieee and ieee' on ranks \\[0\\], 'fp32 in ieee and bf16' on ranks \\[1\\]",
    ),
    "an indexer that learns": (
        lambda indexer: indexer.requires_grad_(True),
        "rank 1: requires_grad is True on the indexer's .*linear_wk.weight.*; accepted is False",
    ),
}


@contextlib.contextmanager
def everything_put_back() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchBackend, "fingerprint", vars(TorchBackend)["fingerprint"])
        yield
    torch.set_flush_denormal(False)
    torch.backends.mkldnn.matmul.fp32_precision = "none"
    torch.set_num_threads(1)


def change_on_one_rank(what: str) -> list[str]:
    """What this rank is told in two forwards after rank 1 alone changed; before that all agree and run."""
    model = gpt(config(num_layers=1))
    ids = tokens()[:, :-1]
    said = []
    with torch.no_grad(), everything_put_back():
        model(ids, None, None)
        if dist.get_rank() == 1:
            CHANGES[what][0](attentions(model)[0].indexer)
        for _ in range(2):
            with pytest.raises(ValueError, match="settings of the query-shard group") as raised:
                model(ids, None, None)
            said.append(str(raised.value))
    return said


def each_change() -> dict[str, list[str]]:
    return {what: change_on_one_rank(what) for what in CHANGES}


def test_what_changes_on_one_rank_after_the_agreement_is_told_on_every_rank() -> None:
    flags = [{PARTITION_VARIABLE: flag} for flag in ("off", "1")]
    for first, second in zip(*megatron_ranks(under_each, 2, flags, each_change, tp=2, timeout=TIMEOUT_S), strict=True):
        for what, (_, sentence) in CHANGES.items():
            (told,) = {*first[what], *second[what]}
            assert re.search(sentence, told), told


class Other(TorchBackend):
    """A backend of another name, as a rank with another card or another Triton would take it."""

    name = "triton"


def refused_kernels(words: list[str], other: bool) -> str:
    """What this rank is told by a first forward, with a setting of its own; with `other` rank 1 chooses otherwise."""
    os.environ[KERNELS_VARIABLE] = words[dist.get_rank()]
    if other and dist.get_rank() == 1:
        attention.choose = lambda *_: Choice(Other())
    model = gpt(config(num_layers=1))
    with torch.no_grad(), pytest.raises(ValueError, match="settings of the query-shard group") as raised:
        model(tokens()[:, :-1], None, None)
    return str(raised.value)


def test_kernels_that_cannot_run_are_refused_by_name_on_every_rank() -> None:
    first, second = megatron_ranks(refused_kernels, 2, ["triton"] * 2, False, tp=2, env=ON, timeout=TIMEOUT_S)
    assert first == second
    for rank in range(2):
        assert f"rank {rank}: MCORE_DSA_KERNELS is 'triton' and device is cpu; accepted is cuda" in first


@pytest.mark.parametrize(
    ("words", "other", "told"),
    [
        (["torch", "triton"], False, "rank 1: MCORE_DSA_KERNELS is 'triton' and device is cpu; accepted is cuda"),
        (
            ["torch", "auto"],
            False,
            "MCORE_DSA_KERNELS is 'torch' on ranks [0], 'auto' on ranks [1]; accepted is the same",
        ),
        (["auto", "auto"], True, "' on ranks [0], 'triton, "),
    ],
)
def test_a_rank_with_other_kernels_is_named_on_every_rank(words: list[str], other: bool, told: str) -> None:
    first, second = megatron_ranks(refused_kernels, 2, words, other, tp=2, env=ON, timeout=TIMEOUT_S)
    assert first == second
    assert told in first


def refused_alone() -> None:
    os.environ[KERNELS_VARIABLE] = "triton"
    with pytest.raises(ValueError, match="MCORE_DSA_KERNELS is 'triton' and device is cpu; accepted is cuda"):
        gpt(config(num_layers=1))


def test_kernels_that_cannot_run_are_refused_while_one_rank_builds() -> None:
    megatron_ranks(refused_alone, 1, env=OFF)


def loaded_anew() -> tuple[int, bool]:
    """Equal weights loaded on every rank after a forward: agreed once more, and the forward is right."""
    model, other = gpt(config(num_layers=1)), gpt(config(num_layers=1))
    ids = tokens()[:, :-1]
    agreements = 0
    original = dist.all_gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        nonlocal agreements
        agreements += 1
        original(*args, **kwargs)

    dist.all_gather_object = counted
    with torch.no_grad():
        expected = other(ids, None, None)
        model(ids, None, None)
        model.load_state_dict(other.state_dict())
        model(ids, None, None)
        return agreements, torch.equal(model(ids, None, None), expected)


def test_weights_that_are_loaded_anew_are_agreed_anew() -> None:
    assert megatron_ranks(loaded_anew, 2, tp=2, env=ON) == [(3, True)] * 2


# Fields that attention and indexer read and that no rank could read differently without an error, or reach no result.
ELSEWHERE = {
    "context_parallel_size": "whether there is a group to agree over",
    "num_layers": "bounds what is kept for a recompute; where one rank has nothing kept, all select again",
    "pipeline_model_parallel_size": "likewise",
    "virtual_pipeline_model_parallel_size": "likewise",
    "perform_initialization": "how weights begin; their digest is agreed",
    "init_method": "how weights begin; their digest is agreed",
}


def fields_read() -> set[str]:
    """Fields of the configuration that our modules read while they are built, run and differentiated."""
    read: set[str] = set()
    names = {field.name for field in fields(KPoolDSATransformerConfig)}
    original = KPoolDSATransformerConfig.__getattribute__

    def recording(self: Any, name: str) -> Any:
        if name in names:
            caller = sys._getframe(1)
            while caller.f_code.co_filename.endswith(("megatron/config.py", __file__)):
                caller = caller.f_back
            if caller.f_code.co_filename.endswith(("megatron/attention.py", "megatron/indexer.py")):
                read.add(name)
        return original(self, name)

    KPoolDSATransformerConfig.__getattribute__ = recording
    ids, full = tokens(), {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    gpt(config(num_layers=1, **full))(ids[:, :-1], None, None, labels=ids[:, 1:]).mean().backward()
    return read


def test_no_field_that_reaches_a_result_is_missing_from_the_contract() -> None:
    agreed = {field.name for field in fields(SelectionContract)}
    for read in megatron_ranks(fields_read, 2, tp=2, env=ON):
        assert read - agreed - set(ELSEWHERE) == set()
        assert {"dsa_indexer_topk", "dsa_indexer_kpool_always_select_tail", "dsa_indexer_scoring_relu"} <= read
        assert set(ELSEWHERE) <= read


def warnings() -> list[str]:
    """What the package warns of from now on."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mcore_dsa.megatron").addHandler(handler)
    return lines


def tell_of_replicas() -> list[str]:
    lines = warnings()
    if parallel_state.get_data_parallel_rank() == 1:
        os.environ[OVERLAP_VARIABLE] = "0"
        # After the other replica: who comes second can say what differs.
        dist.barrier()
    model = gpt(config(num_layers=1))
    with torch.no_grad():
        model(tokens()[:, :-1], None, None)
    if parallel_state.get_data_parallel_rank() == 0:
        dist.barrier()
    return lines


def test_data_parallel_replicas_with_other_settings_are_reported() -> None:
    told = megatron_ranks(tell_of_replicas, 4, tp=2, env=ON, timeout=TIMEOUT_S)
    assert [len(lines) for lines in told] == [0, 0, 1, 0]
    assert f"{OVERLAP_VARIABLE} is 'False' here and 'True' on rank 0" in told[2][0]


def train_without_a_store() -> list[str]:
    def lost(*_: Any) -> Any:
        raise dist.DistNetworkError("connection reset by peer")

    dist.distributed_c10d._get_default_store = lost
    lines, ids = warnings(), tokens()
    gpt(config(num_layers=1))(ids[:, :-1], None, None, labels=ids[:, 1:]).mean().backward()
    return lines


def test_a_lost_store_is_logged_and_ends_nothing() -> None:
    first, second = megatron_ranks(train_without_a_store, 2, tp=2, env=ON, timeout=TIMEOUT_S)
    assert len(first) == 1
    assert first[0].endswith("not compared with those of other tensor-parallel groups: connection reset by peer")
    assert second == []


def saved_bytes() -> list[int]:
    """Bytes of selections that one layer's forward keeps for backward, with each flag; and gradients are equal."""
    kept, gradients = [], []
    for word in ("off", "1", "zigzag", "balanced"):
        os.environ[PARTITION_VARIABLE] = word
        torch.manual_seed(3)
        model_parallel_cuda_manual_seed(3)
        model = gpt(config(num_layers=1))
        ids, found = tokens(), {}

        def keep(tensor: torch.Tensor, found: dict[int, int] = found) -> torch.Tensor:
            if tensor.dtype == torch.int32 and tensor.ndim == 3:
                found[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()
        loss.backward()
        kept.append(sum(found.values()))
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for other in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients[0], other, strict=True))
    return kept


@pytest.mark.parametrize("tp", [2, 4])
def test_backward_keeps_own_rows_only(tp: int) -> None:
    whole = BATCH * ROWS * TOPK // POOL * 4
    told = megatron_ranks(saved_bytes, tp, tp=tp, env=OFF)
    for off, contiguous, zigzag, _ in told:
        assert (off, contiguous, zigzag) == (whole, whole // tp, whole // tp)
    assert sum(balanced for *_, balanced in told) == whole


def three_threads() -> int:
    """Forwards of one module in three threads at once that gave another output than alone."""
    model = gpt(config(num_layers=1))
    batches = [tokens(step)[:, :-1] for step in range(3)]
    with torch.no_grad():
        alone = [model(ids, None, None) for ids in batches]
    wrong: list[int] = []

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(15):
                wrong.append(int(not torch.equal(model(batches[number], None, None), alone[number])))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 45
    return sum(wrong)


def test_three_threads_run_one_module() -> None:
    assert megatron_ranks(three_threads, 1, env=OFF) == [0]


def evaluated_then_trained() -> bool:
    """Evaluation in inference mode first, of sizes that no step had before, then a training step of the same."""
    batch._dense_plan.cache_clear()
    model, ids = gpt(config(num_layers=1)), tokens()
    with torch.inference_mode():
        model(ids[:, :-1], None, None)
    model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean().backward()
    return all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_plan_made_in_inference_mode_serves_a_training_step() -> None:
    """Its tensors, cached for every layer, could not be saved for backward."""
    assert megatron_ranks(evaluated_then_trained, 1, env=OFF) == [True]
