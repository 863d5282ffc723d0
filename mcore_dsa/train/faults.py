"""What of a run cannot run, before anything is built: each fault in one line with its field and what is accepted.

Limits of a single field are in its type; what the attention accepts is up to its own configuration class.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from mcore_dsa.train.config import JobConfig


def faults_of(config: JobConfig, world_size: int) -> list[str]:
    """One line for each value that cannot run on `world_size` ranks."""
    if faults := [*_number_faults(asdict(config)), *_path_faults(config)]:
        return faults
    if world_size % config.model_ranks:
        return [
            f"the number of ranks is {world_size}; accepted is a multiple of parallel.tensor * parallel.pipeline * "
            f"parallel.context, {config.model_ranks}"
        ]
    return [
        *_divisibility_faults(config, world_size),
        *_pipeline_faults(config, world_size),
        *_pattern_faults(config),
        *_expert_faults(config, world_size),
        *_pack_faults(config),
        *_schedule_faults(config),
        *_job_faults(config),
    ]


def _number_faults(values: dict[str, Any], prefix: str = "") -> list[str]:
    """What no arithmetic with the configuration survives, or would loop over for good."""
    faults = []
    for key, value in values.items():
        name = prefix + key
        if isinstance(value, dict):
            faults += _number_faults(value, f"{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            faults.append(f"{name} is {value}; accepted is a finite number")
        elif isinstance(value, int) and value >= _BOUNDS.get(name, 2**31):
            faults.append(f"{name} is {value}; accepted is an integer < {_BOUNDS.get(name, 2**31)}")
    return faults


# Where it is not 2**31. Folders of checkpoints have eight digits.
_BOUNDS = {"training.steps": 10**8, "max_data_bytes": 2**63}


def _path_faults(config: JobConfig) -> list[str]:
    """Paths that mean the folder that the run was started in, or a new one by the name of ~, or none."""
    paths = [
        ("run_dir", config.run_dir),
        ("load_hf", config.load_hf),
        ("tokenizer", config.tokenizer),
        ("evaluation.data", config.evaluation.data),
        *(("data", path) for path in config.data),
    ]
    return [
        f"{name} has {path!r}; accepted are names of files and folders, written out where a shell knows them as ~"
        for name, path in paths
        if path is not None and (not path.strip() or "\0" in path or path.startswith("~"))
    ]


def _divisibility_faults(config: JobConfig, world_size: int) -> list[str]:
    model, parallel, training = config.model, config.parallel, config.training
    samples = training.micro_batch_size * config.data_parallel_size(world_size)
    rules = [
        ("model.num_attention_heads", model.num_attention_heads, parallel.tensor, "parallel.tensor"),
        ("model.ffn_hidden_size", model.ffn_hidden_size, parallel.tensor, "parallel.tensor"),
        (
            "training.global_batch_size",
            training.global_batch_size,
            samples,
            "training.micro_batch_size * data-parallel ranks",
        ),
    ]
    if parallel.context == 1:
        rules.append(("training.sequence_length", training.sequence_length, parallel.tensor, "parallel.tensor"))
    else:
        # Two parts for each context-parallel rank, whose rows are cut over its tensor-parallel ranks.
        parts = parallel.context * math.lcm(2, parallel.tensor)
        name = "2 * parallel.context and of parallel.tensor * parallel.context"
        rules.append(("training.sequence_length", training.sequence_length, parts, name))
    if model.host == "gpt":
        chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
        rules.append(("model.num_layers", model.num_layers, chunks, "parallel.pipeline * parallel.virtual_pipeline"))
    return [
        f"{name} is {value}; accepted is a multiple of {factor_name}, {factor}"
        for name, value, factor, factor_name in rules
        if value % factor
    ]


def _pipeline_faults(config: JobConfig, world_size: int) -> list[str]:
    chunks, stages = config.parallel.virtual_pipeline, config.parallel.pipeline
    if chunks is None:
        return []
    if stages == 1:
        return [f"parallel.virtual_pipeline is {chunks}; accepted with parallel.pipeline 1 is null"]
    if chunks == 1:
        return ["parallel.virtual_pipeline is 1; accepted is null, or an integer >= 2"]
    batches = config.micro_batches(world_size)
    if batches == 0 or batches % stages:
        return [
            f"training.global_batch_size is {config.training.global_batch_size}, {batches} micro batches a step; "
            f"accepted with parallel.virtual_pipeline is a multiple of parallel.pipeline, {stages}, of them"
        ]
    return []


def _pattern_faults(config: JobConfig) -> list[str]:
    """What Megatron would build a part of, without an error, or could not build."""
    model, parallel = config.model, config.parallel
    pattern = model.hybrid_layer_pattern
    name = f"model.hybrid_layer_pattern is {pattern!r}"
    if (pattern is None) != (model.host == "gpt"):
        accepted = "null" if model.host == "gpt" else "a pattern such as 'D-D-'"
        return [f"{name}; accepted with model.host {model.host} is {accepted}"]
    if pattern is None:
        return []
    parts, chunks = pattern.split("|"), parallel.pipeline * (parallel.virtual_pipeline or 1)
    letters = "".join(parts)
    faults = []
    if "D" not in letters or set(letters) - set("D-E"):
        faults.append(f"{name}; accepted are the letters 'D', at least once, '-' and 'E'")
    if ("E" in letters) != (model.num_moe_experts is not None):
        experts = "null is one without 'E'" if model.num_moe_experts is None else "given is one with 'E'"
        faults.append(f"{name}; accepted with model.num_moe_experts {experts}")
    if len(letters) != model.num_layers:
        faults.append(f"{name}; accepted is one of model.num_layers letters, {model.num_layers}")
    if len(parts) != chunks:
        faults.append(
            f"{name}; accepted is one of parallel.pipeline * parallel.virtual_pipeline parts, {chunks}, between '|'"
        )
    return faults


def _expert_faults(config: JobConfig, world_size: int) -> list[str]:
    model, parallel = config.model, config.parallel
    experts = model.num_moe_experts
    sizes = {
        "model.moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "model.moe_router_topk": model.moe_router_topk,
        "model.moe_aux_loss_coeff": model.moe_aux_loss_coeff,
    }
    if experts is None:
        faults = [
            f"{name} is {value}; accepted with model.num_moe_experts null is null"
            for name, value in sizes.items()
            if value is not None
        ]
        if parallel.expert > 1:
            faults.append(f"parallel.expert is {parallel.expert}; accepted with model.num_moe_experts null is 1")
        return faults
    faults = [
        f"{name} is null; accepted with model.num_moe_experts {experts} is a number"
        for name, value in sizes.items()
        if value is None
    ]
    if model.moe_router_topk is not None and model.moe_router_topk > experts:
        faults.append(
            f"model.moe_router_topk is {model.moe_router_topk}; accepted is at most model.num_moe_experts, {experts}"
        )
    if model.moe_ffn_hidden_size is not None and model.moe_ffn_hidden_size % parallel.tensor:
        faults.append(
            f"model.moe_ffn_hidden_size is {model.moe_ffn_hidden_size}; accepted is a multiple of parallel.tensor, "
            f"{parallel.tensor}"
        )
    ranks = parallel.context * config.data_parallel_size(world_size)
    if experts % parallel.expert or ranks % parallel.expert:
        faults.append(
            f"parallel.expert is {parallel.expert}; accepted is a divisor of model.num_moe_experts, {experts}, and of "
            f"the context- and data-parallel ranks, {ranks}"
        )
    return faults


def _pack_faults(config: JobConfig) -> list[str]:
    if not config.pack:
        return []
    multiple, context, training = config.document_multiple, config.parallel.context, config.training
    faults = []
    if context > 1 and multiple % (2 * context):
        faults.append(f"document_multiple is {multiple}; accepted is a multiple of 2 * parallel.context, {2 * context}")
    if training.sequence_length % multiple:
        faults.append(
            f"training.sequence_length is {training.sequence_length}; accepted with pack true is a multiple of "
            f"document_multiple, {multiple}"
        )
    if training.micro_batch_size > 1:
        faults.append(
            f"training.micro_batch_size is {training.micro_batch_size}; accepted with pack true is 1: a longer pack "
            "does as much"
        )
    return faults


def _schedule_faults(config: JobConfig) -> list[str]:
    model, training = config.model, config.training
    faults = []
    if training.min_lr > training.lr:
        faults.append(f"training.min_lr is {training.min_lr}; accepted is at most training.lr, {training.lr}")
    if training.warmup_steps >= training.lr_decay_steps:
        faults.append(
            f"training.warmup_steps is {training.warmup_steps}; accepted is less than training.decay_steps, "
            f"{training.lr_decay_steps}"
        )
    if config.waiting.end_after_s < config.waiting.say_after_s:
        faults.append(
            f"waiting.end_after_s is {config.waiting.end_after_s}; accepted is at least waiting.say_after_s, "
            f"{config.waiting.say_after_s}"
        )
    below_one = {
        "model.hidden_dropout": model.hidden_dropout,
        "training.adam_beta1": training.adam_beta1,
        "training.adam_beta2": training.adam_beta2,
    }
    return faults + [
        f"{name} is {value}; accepted is a number in [0, 1)" for name, value in below_one.items() if value >= 1
    ]


def _job_faults(config: JobConfig) -> list[str]:
    faults = []
    if config.compare_unsharded and config.parallel.tensor == 1:
        faults.append("compare_unsharded is true; accepted with parallel.tensor 1 is false: nothing is sharded")
    if config.load_hf is not None and (config.resume is True or config.resume_from is not None):
        faults.append(
            f"load_hf is {config.load_hf!r}; accepted with resume true is null: the run's checkpoint has it all"
        )
    if config.resume == "auto" and config.resume_from is not None:
        faults.append(f"resume_from is {config.resume_from}; accepted with resume auto is null")
    return faults + _watching_faults(config)


def _watching_faults(config: JobConfig) -> list[str]:
    evaluation, logging = config.evaluation, config.logging
    faults = []
    if (evaluation.data is not None) != bool(evaluation.every):
        accepted = "0" if evaluation.every else "an integer >= 1"
        faults.append(
            f"evaluation.every is {evaluation.every}; accepted with evaluation.data {evaluation.data!r} is {accepted}"
        )
    if logging.wandb is not None and find_spec("wandb") is None:
        faults.append(
            f"logging.wandb is {logging.wandb!r}; accepted without wandb is null: pip install 'mcore-dsa[wandb]'"
        )
    return faults
