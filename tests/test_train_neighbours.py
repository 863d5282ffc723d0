"""Packs of files, context parallelism, pipelines and experts together, each against one rank's gradients."""

import pytest
from train_layouts import Reference, assert_as_one_rank, reference_of, run_layout
from train_runs import write_files

# One step each: what may go wrong here does so in the first gradients.
STEP = "--training.steps 2 --training.global_batch_size 4"
EXPERTS = (
    "--model.num_moe_experts 4 --model.moe_router_topk 2 --model.moe_ffn_hidden_size 32 --model.moe_aux_loss_coeff 0.01"
)
MODELS = {
    "dense": "--model.num_layers 4",
    "moe": f"--model.num_layers 2 {EXPERTS}",
    "hybrid": f"--model.host hybrid --model.hybrid_layer_pattern DED- --model.num_layers 4 {EXPERTS}",
}
LAYOUTS: dict[str, list[dict[str, int]]] = {
    "dense packed": [
        {"tp": 2},
        {"dp": 2},
        {"pp": 2, "vp": 2},
        {"cp": 4},
        {"tp": 2, "cp": 2},
        {"cp": 2, "pp": 2},
        {"cp": 2, "pp": 2, "vp": 2},
    ],
    "moe": [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "dp": 2, "ep": 2}, {"tp": 2, "dp": 2, "ep": 2}],
    "moe packed": [{"dp": 2, "ep": 2}, {"cp": 2, "ep": 2}, {"pp": 2, "cp": 2, "ep": 2}],
    "hybrid packed": [{"tp": 2}, {"cp": 2, "ep": 2}],
}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    files = write_files(tmp_path_factory.mktemp("text") / "files")
    packed = f"--pack --data {files} --training.sequence_length 128"
    found = {}
    for name in LAYOUTS:
        model, _, pack = name.partition(" ")
        options = f"{MODELS[model]} {STEP} {packed if pack else ''}"
        found[name] = reference_of(options, tmp_path_factory.mktemp(model))
    return found


@pytest.mark.parametrize(
    ("name", "sizes"), [(name, sizes) for name, layouts in LAYOUTS.items() for sizes in layouts], ids=str
)
def test_a_layout_has_the_gradients_and_losses_of_one_rank(
    name: str, sizes: dict[str, int], references: dict[str, Reference]
) -> None:
    run, errors = run_layout(references[name], **sizes)
    assert_as_one_rank(references[name], run, errors, exact=sizes.keys() <= {"pp", "vp"})
