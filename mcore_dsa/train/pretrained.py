"""The attention of a run's model out of a Hugging Face checkpoint; all other weights stay as they were initialised."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from mcore_dsa.binding import CheckpointBinding, verify
from mcore_dsa.checkpoint import changed_files, load_attention
from mcore_dsa.megatron import KPoolDSATransformerConfig, KPoolDSAttention
from mcore_dsa.tp_plan import DsaTpPlan
from mcore_dsa.train.config import JobConfig, ModelConfig
from mcore_dsa.train.together import told_to_every_rank

_logger = logging.getLogger(__name__)

# What the model and the checkpoint must have in common, under Megatron's names.
_SHAPE = (
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "v_head_dim",
    "dsa_indexer_n_heads",
    "dsa_indexer_head_dim",
    "dsa_indexer_topk",
    "dsa_indexer_kpool",
    "dsa_indexer_kpool_always_select_tail",
    "layernorm_epsilon",
)


def find_pretrained(config: JobConfig) -> CheckpointBinding:
    """The checkpoint that `load_hf` names, by its headers.

    Raises: ValueError where it cannot be read, a layer that the model takes has faults, its geometry is not the
    model's, it has fewer DSA layers, or the library that will read it is not installed.
    """
    if find_spec("safetensors") is None:
        raise ValueError(
            f"load_hf is {config.load_hf!r}; accepted without safetensors is null: pip install 'mcore-dsa[hf]'"
        )
    try:
        binding = verify(str(config.load_hf))
        layers = _dsa_layers_before(config.model, config.model.num_layers + 1)
        binding.raise_faults(binding.layers[:layers])
    except (OSError, ValueError) as error:
        raise ValueError(f"load_hf is {config.load_hf!r}; accepted is a checkpoint's folder: {error}") from error
    model = config.model
    theirs = KPoolDSATransformerConfig.from_geometry(binding.geometry, num_layers=model.num_layers)
    given = f"with load_hf {config.load_hf!r}"
    faults = [
        f"model.{name} is {getattr(model, name)!r}; accepted {given} is {getattr(theirs, name)!r}"
        for name in _SHAPE
        if getattr(model, name) != getattr(theirs, name)
    ]
    if layers > len(binding.layers):
        faults.append(f"the number of DSA layers is {layers}; accepted {given} is at most its {len(binding.layers)}")
    if faults:
        raise ValueError("\n".join(faults))
    return binding


def load_pretrained(chunks: Sequence[nn.Module], model: ModelConfig, binding: CheckpointBinding) -> None:
    """Give this rank's attention layers their slices: the model's n-th DSA layer takes the checkpoint's n-th.

    Weights are converted to the model's dtype as they are copied. Parameters stay where they are, so that buffers over
    them hold the new values; an optimizer that has copied the old ones does not. Every rank has to call this.

    Raises: ValueError on every rank for a file that is not what the checkpoint's digests say, where it has them.
    """
    layers = binding.layers[: _dsa_layers_before(model, model.num_layers + 1)]
    with told_to_every_rank(f"load_hf is {str(binding.path)!r}; accepted is a checkpoint that can be read"):
        changed = changed_files(binding, layers, rank=dist.get_rank(), ranks=dist.get_world_size())
        if changed:
            raise ValueError(changed[0])
    rank = parallel_state.get_tensor_model_parallel_rank()
    plan = DsaTpPlan(rank, parallel_state.get_tensor_model_parallel_world_size(), binding.geometry)
    for chunk in chunks:
        for module in chunk.modules():
            core = getattr(module, "core_attention", None)
            if isinstance(core, KPoolDSAttention):
                layer = binding.layers[_dsa_layers_before(model, core.layer_number)]
                _copy(load_attention(binding, layer, plan), module)
    if dist.get_rank() == 0:
        _logger.info(
            "attention of the model's %d layers from layers %s of %s, %s with %d DSA layers; all else is initialised",
            len(layers),
            ", ".join(map(str, layers)),
            binding.path,
            binding.storage,
            len(binding.layers),
        )


def _dsa_layers_before(model: ModelConfig, layer_number: int) -> int:
    """DSA layers in front of Megatron's layer `layer_number`, counted from 1 over all pipeline stages."""
    if model.hybrid_layer_pattern is None:
        return layer_number - 1
    return model.hybrid_layer_pattern.replace("|", "")[: layer_number - 1].count("D")


@torch.no_grad()
def _copy(tensors: Mapping[str, Tensor], attention: nn.Module) -> None:
    parameters = dict(attention.named_parameters())
    assert parameters.keys() == tensors.keys(), sorted(parameters.keys() ^ tensors.keys())
    for name, tensor in tensors.items():
        assert parameters[name].shape == tensor.shape, name
        parameters[name].copy_(tensor)
