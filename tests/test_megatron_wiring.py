"""That no layer selects tokens: what a built model, and Megatron's own `DSAttention`, say of a forgotten plug."""

from collections.abc import Callable
from typing import Any

import megatron.core.models.gpt.experimental_attention_variant_module_specs as variant_specs
import pytest
import torch
from harness import megatron_ranks
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from models import ROWS, VOCAB, config, gpt, hybrid, stock_config, stock_gpt

from mcore_dsa.megatron import check_wiring, spec, use_kpool_dsa
from mcore_dsa.megatron.backend import LocalBackend

BACKEND = LocalBackend()


def block_of(layers: list[ModuleSpec]) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=BACKEND.layer_norm(rms_norm=True))


def stock_layers() -> list[ModuleSpec]:
    return variant_specs.get_transformer_layer_with_experimental_attention_variant_spec(config(), BACKEND)


def message(run: Callable[[], Any], kind: type[Exception] = RuntimeError) -> str:
    with pytest.raises(kind) as raised:
        run()
    return str(raised.value)


def wiring_faults() -> dict[str, str]:
    """What models say whose selection is Megatron's own."""
    said: dict[str, str] = {}
    cfg = config()
    stock = stock_gpt(stock_config())
    said["stock"] = str([name for name, module in stock.named_modules() if isinstance(module, DSAttention)])
    said["built by somebody else"] = message(lambda: check_wiring(stock))
    said["nothing of it"] = message(lambda: check_wiring(torch.nn.Linear(1, 1)))
    said["another number"] = message(lambda: check_wiring(gpt(cfg), layers=3))
    said["hybrid without"] = message(lambda: hybrid(cfg, "--"))
    assert check_wiring(gpt(cfg), layers=2) == check_wiring(gpt(cfg)) == 2
    return said


def test_a_stock_selection_is_detected() -> None:
    (said,) = megatron_ranks(wiring_faults, 1)
    stock = "['decoder.layers.0.self_attention.core_attention', 'decoder.layers.1.self_attention.core_attention']"
    # A model of Megatron's own specification does hold what is refused.
    assert said["stock"] == stock
    number = "the number of layers with k-pool DSA is"
    assert said["built by somebody else"] == (
        f"{number} 0; accepted is 2, that of layers with absorbed MLA, "
        f"and no DSAttention, which selects tokens: {stock}"
    )
    assert said["nothing of it"] == f"{number} 0; accepted is >= 1 in a model that is not one stage of a pipeline"
    assert said["hybrid without"] == said["nothing of it"]
    assert said["another number"] == f"{number} 2; accepted is 3"


class OwnHost(AbsorbedMLASelfAttention):
    """Takes Megatron's submodules, whatever it is given: nothing that a specification shows."""

    def __init__(self, config: Any, submodules: Any, **arguments: Any) -> None:
        own = variant_specs.get_dsa_module_spec_for_backend(config, BACKEND).submodules
        super().__init__(config, own, **arguments)


def forgotten_plugs() -> list[str]:
    """What models say whose specification nobody gave to `use_kpool_dsa`, on the configuration of k-pool DSA."""

    def model(block: TransformerBlockSubmodules) -> GPTModel:
        return GPTModel(cfg, block, VOCAB, ROWS, position_embedding_type="none")

    cfg = config()
    said = [message(lambda: model(block_of(stock_layers())), TypeError)]
    plugged = use_kpool_dsa(block_of(stock_layers()))
    assert check_wiring(model(plugged)) == 2
    plugged.layer_specs[1].submodules.self_attention.module = OwnHost
    said.append(message(lambda: model(plugged), TypeError))
    vars(spec).update(use_kpool_dsa=lambda given: given)
    return [*said, message(lambda: gpt(cfg), TypeError), message(lambda: hybrid(cfg, "D-"), TypeError)]


def test_megatrons_own_selection_refuses_this_configuration() -> None:
    (said,) = megatron_ranks(forgotten_plugs, 1)
    assert len(said) == 4
    for line in said:
        assert line.startswith("config is a KPoolDSATransformerConfig; accepted by Megatron's DSAttention")
        assert "give the specification to use_kpool_dsa" in line


def stage_of_a_mixed_pipeline() -> tuple[int, str]:
    """Two plain layers, then two of DSA, over two stages; a builder's own count and the wiring's."""
    cfg = config(num_layers=4)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    plain = get_gpt_layer_local_spec(normalization="RMSNorm")
    block = block_of([plain, plain] if stage == 0 else stock_layers()[:2])
    ends = {"pre_process": stage == 0, "post_process": stage == 1}
    model = GPTModel(cfg, use_kpool_dsa(block, whole=False), VOCAB, ROWS, position_embedding_type="none", **ends)
    return check_wiring(model), message(lambda: check_wiring(model, layers=1))


def test_a_stage_without_such_a_layer_is_accepted_and_counted() -> None:
    (first, refused), (second, _) = megatron_ranks(stage_of_a_mixed_pipeline, 2, pp=2)
    assert (first, second) == (0, 2)
    assert refused == "the number of layers with k-pool DSA is 0; accepted is 1"
