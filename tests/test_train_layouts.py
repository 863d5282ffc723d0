"""Every layout of the job against one rank: tensor, context, data and pipeline parallelism of dense models."""

import pytest
from train_layouts import ROUNDINGS, Reference, assert_as_one_rank, reference_of, run_layout

# Four stages of two chunks pass messages forward and back at once from eight micro-batches on; what the optimizer does
# with gradients does not depend on the host.
HOSTS = {
    "gpt": "--model.num_layers 4",
    "hybrid": "--model.host hybrid --model.hybrid_layer_pattern D-D-D-D- --model.num_layers 8"
    " --training.global_batch_size 8 --training.steps 2",
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    return {host: reference_of(model, tmp_path_factory.mktemp(host)) for host, model in HOSTS.items()}


# Behind the loaded one.
ONE = "--training.steps 2"
# A first step shows gradients and their norm, a second one what the optimizer does with them: that depends on how
# tensors are cut and on whom it shares its state with, not on where in a pipeline a layer is.
GPT_LAYOUTS: list[tuple[dict[str, int], int]] = [
    ({"tp": 2}, 2),
    ({"tp": 4}, 1),
    ({"dp": 2}, 2),
    ({"pp": 2}, 1),
    ({"pp": 2, "vp": 2}, 2),
    ({"tp": 2, "dp": 2}, 2),
    ({"tp": 2, "pp": 2}, 1),
    ({"dp": 2, "pp": 2}, 1),
    ({"tp": 2, "pp": 2, "vp": 2}, 1),
    ({"cp": 4}, 1),
    ({"tp": 2, "cp": 2}, 1),
    ({"cp": 2, "dp": 2}, 2),
    ({"cp": 2, "pp": 2, "vp": 2}, 1),
]
HYBRID_LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("D-D-D-D-", {"tp": 2}),
    ("D-D-D-D-", {"cp": 2}),
    ("D-D-|D-D-", {"pp": 2}),
    ("D-|D-|D-|D-", {"pp": 2, "vp": 2}),
    ("D|-|D|-|D|-|D|-", {"pp": 4, "vp": 2}),
]


@pytest.mark.parametrize(("sizes", "steps"), GPT_LAYOUTS, ids=str)
def test_a_layout_has_the_gradients_and_losses_of_one_rank(
    sizes: dict[str, int], steps: int, references: dict[str, Reference]
) -> None:
    run, errors = run_layout(references["gpt"], f"--training.steps {1 + steps}", **sizes)
    assert len(run.losses) == steps
    assert_as_one_rank(references["gpt"], run, errors, exact=sizes.keys() <= {"pp", "vp"})


@pytest.mark.parametrize(("pattern", "sizes"), HYBRID_LAYOUTS, ids=str)
def test_a_hybrid_layout_has_the_gradients_and_losses_of_one_rank(
    pattern: str, sizes: dict[str, int], references: dict[str, Reference]
) -> None:
    run, errors = run_layout(references["hybrid"], f"--model.hybrid_layer_pattern {pattern}", **sizes)
    assert_as_one_rank(references["hybrid"], run, errors, exact=sizes.keys() <= {"pp", "vp"})


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_in_a_pipeline_changes_no_bit(recompute: str, references: dict[str, Reference]) -> None:
    run, errors = run_layout(references["gpt"], f"--training.recompute {recompute} {ONE}", pp=2, vp=2)
    assert_as_one_rank(references["gpt"], run, errors, exact=True)


def test_batches_of_messages_train_wrong_between_two_stages_of_chunks(references: dict[str, Reference]) -> None:
    """What `KPoolDSATransformerConfig` refuses; where this fails, Megatron has mended it."""
    batched = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    _, errors = run_layout(references["gpt"], ONE, pp=2, vp=2, p2p=batched)
    assert max(errors.values()) > 1e3 * ROUNDINGS
    for right in ({"pp": 2}, {"pp": 2, "vp": 2}):
        single = {"overlap_p2p_comm": False, "batch_p2p_comm": right == {"pp": 2}}
        run, errors = run_layout(references["gpt"], ONE, p2p=single, **right)
        assert_as_one_rank(references["gpt"], run, errors, exact=True)
