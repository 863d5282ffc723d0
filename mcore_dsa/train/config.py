"""One run as typed data: every field of a configuration file, each of them an option of the command line as well.

No field has a default of its own. A configuration file states the whole run, so that it can be read, compared and
repeated without this source; a missing field is an error that names it, and reads as null where null is a value.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser

# To mypy these are Any. An alias of int behind TYPE_CHECKING would not do: jsonargparse would find it
# and check by it.
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from mcore_dsa.train.plain_yaml import PLAIN_YAML, ConfigFile


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: sizes of the whole model over all ranks, under Megatron's names.

    Attributes:
        host: Megatron's model class around the attention, GPTModel or HybridModel.
        hybrid_layer_pattern: HybridModel's pattern, one letter a layer ('D' attention, '-' MLP, 'E' experts) and '|'
            between the pipeline's chunks; null with host gpt.
        num_layers: transformer layers; with host hybrid the letters of the pattern.
        hidden_size: channels of a hidden row.
        ffn_hidden_size: channels inside an MLP.
        num_moe_experts: experts of a mixture, in every layer with host gpt; null for dense MLPs.
        moe_ffn_hidden_size: channels inside an expert, null without experts.
        moe_router_topk: experts that a token goes to, null without experts.
        moe_aux_loss_coeff: weight of the loss that balances the experts' load, null without experts.
        num_attention_heads: attention heads.
        q_lora_rank: channels of the compressed query.
        kv_lora_rank: channels of the latent that stands for keys and values.
        qk_head_dim: channels of a head's query and key.
        v_head_dim: channels of a head's value.
        dsa_indexer_n_heads: heads of the indexer.
        dsa_indexer_head_dim: channels of an indexer head.
        dsa_indexer_topk: tokens a row may select, a multiple of dsa_indexer_kpool.
        dsa_indexer_kpool: consecutive tokens compressed to one indexer key.
        dsa_indexer_kpool_always_select_tail: whether a row also attends to its own incomplete pool.
        layernorm_epsilon: epsilon of the RMS norms.
        init_method_std: standard deviation of the initial weights.
        hidden_dropout: dropout on the residual branches.
        vocab_size: token ids, greater than every token of the data: 256 for bytes.
        make_vocab_size_divisible_by: pads them to a multiple of this times parallel.tensor.
    """

    host: Literal["gpt", "hybrid"]
    hybrid_layer_pattern: str | None
    num_layers: PositiveInt
    hidden_size: PositiveInt
    ffn_hidden_size: PositiveInt
    num_moe_experts: PositiveInt | None
    moe_ffn_hidden_size: PositiveInt | None
    moe_router_topk: PositiveInt | None
    moe_aux_loss_coeff: NonNegativeFloat | None
    num_attention_heads: PositiveInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_head_dim: PositiveInt
    v_head_dim: PositiveInt
    dsa_indexer_n_heads: PositiveInt
    dsa_indexer_head_dim: PositiveInt
    dsa_indexer_topk: PositiveInt
    dsa_indexer_kpool: PositiveInt
    dsa_indexer_kpool_always_select_tail: bool
    layernorm_epsilon: PositiveFloat
    init_method_std: PositiveFloat
    hidden_dropout: NonNegativeFloat
    vocab_size: PositiveInt
    make_vocab_size_divisible_by: PositiveInt


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How the model is spread. Ranks left over form the data-parallel groups.

    Attributes:
        tensor: tensor-parallel ranks; sequence parallelism is on whenever there is more than one.
        pipeline: pipeline stages.
        virtual_pipeline: model chunks on each pipeline rank (interleaved schedule), null for one.
        context: context-parallel ranks; each holds two of the 2 * context equal parts of every sequence or document.
        expert: expert-parallel ranks, out of the context- and data-parallel ones.
    """

    tensor: PositiveInt
    pipeline: PositiveInt
    virtual_pipeline: PositiveInt | None
    context: PositiveInt
    expert: PositiveInt


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Steps, batches and the optimizer.

    Attributes:
        steps: optimizer steps of the whole run, those before a resume counted.
        micro_batch_size: sequences in one forward pass of one data-parallel rank.
        global_batch_size: sequences in one optimizer step over all data-parallel ranks.
        sequence_length: tokens in a sequence.
        seed: of the initial weights, dropout and the order of the data.
        dtype: of weights and activations; bf16 keeps fp32 master weights and reduces gradients in fp32.
        recompute: activations to recompute in the backward pass, none, the core attention's (selective) or all (full).
        lr: learning rate after the warm-up.
        min_lr: learning rate at the end of the decay.
        warmup_steps: steps of linear warm-up from 0; a run of fewer steps ends in it.
        decay_steps: step at which the decay ends, null for the last one.
        decay_style: shape of the decay.
        weight_decay: decoupled weight decay of matrices.
        adam_beta1: Adam's first decay rate.
        adam_beta2: Adam's second decay rate.
        clip_grad: greatest norm of the gradient, 0 for no clipping.
    """

    steps: PositiveInt
    micro_batch_size: PositiveInt
    global_batch_size: PositiveInt
    sequence_length: PositiveInt
    seed: NonNegativeInt
    dtype: Literal["fp32", "bf16"]
    recompute: Literal["none", "selective", "full"]
    lr: PositiveFloat
    min_lr: NonNegativeFloat
    warmup_steps: NonNegativeInt
    decay_steps: PositiveInt | None
    decay_style: Literal["constant", "linear", "cosine"]
    weight_decay: NonNegativeFloat
    adam_beta1: NonNegativeFloat
    adam_beta2: NonNegativeFloat
    clip_grad: NonNegativeFloat

    @property
    def lr_decay_steps(self) -> int:
        """The step at which the decay ends; of a run that is shorter than its warm-up, the one after that."""
        return int(max(self.steps, self.warmup_steps + 1) if self.decay_steps is None else self.decay_steps)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, in <run_dir>/checkpoints.

    Attributes:
        save_every: steps between two checkpoints, 0 for only the one at the end.
        keep: newest checkpoints to keep, older ones are removed; null keeps all.
    """

    save_every: NonNegativeInt
    keep: PositiveInt | None


@dataclass(frozen=True, kw_only=True)
class WaitingConfig:
    """What a rank does while another one does not come to a collective.

    Attributes:
        say_after_s: seconds after which it says so, with the rank that it waits for.
        end_after_s: seconds after which the run ends with that, if no rank has moved meanwhile.
    """

    say_after_s: PositiveFloat
    end_after_s: PositiveFloat


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What rank 0 shows. <run_dir>/metrics.jsonl is always written.

    Attributes:
        progress: whether to draw a progress bar on stderr.
        tensorboard: whether to write TensorBoard's event files to <run_dir>/tensorboard.
        wandb: project of Weights & Biases to log to as well, null for none.
        selections_every: steps between two records of what the run's first samples select, in <run_dir>/selections, 0
            for none.
    """

    progress: bool
    tensorboard: bool
    wandb: str | None
    selections_every: NonNegativeInt


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """A set that the run does not train on, whose loss is taken now and then; it changes no bit of the training.

    Attributes:
        data: file, folder or prefix of an indexed data set; null for no evaluation.
        every: steps between two evaluations, 0 for none.
        batches: global batches in each, the same ones every time.
    """

    data: str | None
    every: NonNegativeInt
    batches: PositiveInt


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """One run.

    Attributes:
        run_dir: folder of everything that the run writes.
        data: files or folders to train on, or prefixes of Megatron's indexed data sets; empty for the sources of
            Python's standard library.
        max_data_bytes: bytes of them to read at most.
        tokenizer: a Hugging Face tokenizer.json whose ids are the tokens of text, null for its bytes.
        pack: whether a sample holds whole files, one after the other, that do not attend to each other, or a window of
            one text.
        document_multiple: tokens that each file in a pack is padded to a multiple of; 2 * parallel.context divides it.
        resume: whether to continue from the latest checkpoint in run_dir; auto does where there is one that is whole,
            and starts a run where there is none.
        resume_from: step whose checkpoint in run_dir to continue from in place of the latest, null for none.
        compare_unsharded: whether to run the same steps again with the indexer unsharded and compare every loss.
        load_hf: folder of a Hugging Face checkpoint whose DSA layers give the model's attention its initial weights,
            null for random ones.
        profile: whether to write a trace of the second step that this process does, or of its only one, of each rank to
            <run_dir>/profile.
    """

    run_dir: str
    data: list[str]
    max_data_bytes: PositiveInt
    tokenizer: str | None
    pack: bool
    document_multiple: PositiveInt
    resume: bool | Literal["auto"]
    resume_from: PositiveInt | None
    compare_unsharded: bool
    load_hf: str | None
    profile: bool
    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    waiting: WaitingConfig
    logging: LoggingConfig

    @property
    def padded_vocab_size(self) -> int:
        """The token ids, padded for the vocabulary-parallel layers."""
        multiple = self.model.make_vocab_size_divisible_by * self.parallel.tensor
        return int(-(-self.model.vocab_size // multiple) * multiple)

    @property
    def model_ranks(self) -> int:
        """Ranks that share one sample."""
        return int(self.parallel.tensor * self.parallel.pipeline * self.parallel.context)

    def data_parallel_size(self, world_size: int) -> int:
        """Ranks among `world_size`, which `faults_of` has accepted, that read samples of their own."""
        return int(world_size // self.model_ranks)

    def micro_batches(self, world_size: int) -> int:
        """Micro batches of one data-parallel rank in one step."""
        samples = self.training.micro_batch_size * self.data_parallel_size(world_size)
        return int(self.training.global_batch_size // samples)


def build_parser() -> ArgumentParser:
    """The command line: `--config FILE` and an option for every field; see `_spelled` for how it may be written."""
    parser = ArgumentParser(
        exit_on_error=False,
        allow_abbrev=False,
        parser_mode=PLAIN_YAML,
        prog="python -m mcore_dsa.train",
        usage="torchrun ... -m mcore_dsa.train --config FILE [--FIELD VALUE ...]",
        description="Train a Megatron model with k-pool DSA. Every field of the file can be overridden by an option.",
    )
    parser.add_argument("--config", action=ConfigFile, help="YAML file that states the run; later options override it.")
    parser.add_argument("--debug", action="store_true", help="Show where a refusal was raised.")
    parser.add_class_arguments(JobConfig)
    # There is no public way to the options of a class.
    for action in parser._actions:
        hint = getattr(action, "_typehint", None)
        if bool in (hint, *get_args(hint)):
            action.nargs, action.const = "?", True
    return parser


def parse_config(arguments: Sequence[str] | None = None) -> JobConfig:
    """The run that a command line asks for.

    Args:
        arguments: the command line without the program's name, by default this process's own.

    Raises: ValueError in one line with the field's name, SystemExit for `--help`.
    """
    parser = build_parser()
    try:
        values = parser.instantiate(parser.parse_args(_spelled(sys.argv[1:] if arguments is None else arguments)))
    except (argparse.ArgumentError, ValueError, TypeError, RuntimeError) as error:
        # What jsonargparse makes of a mapping in place of a list names nothing.
        what = "the configuration cannot be read: " if isinstance(error, RuntimeError) else ""
        # A value may be as long as its file.
        raise ValueError(what + _said(" ".join(str(error).split()))[:500]) from error
    del values["config"], values["debug"]
    return JobConfig(**dict(values.items(branches=False)))


def _spelled(arguments: Sequence[str]) -> list[str]:
    """A command line as the parser reads it: underscores in names, and the words behind `--data` as one list."""
    spelled: list[str] = []
    paths: list[str] | None = None
    for word in arguments:
        if not word.startswith("--"):
            if paths is None:
                spelled.append(word)
            else:
                paths.append(word)
                spelled[-1] = json.dumps(paths)
            continue
        name, equals, value = word.partition("=")
        name = "--" + name[2:].replace("-", "_")
        paths = None
        if name == "--data":
            paths = [value] if equals else []
            spelled += [name, json.dumps(paths)]
        else:
            spelled.append(name + equals + value)
    return spelled


_KINDS = {
    bool: "true or false",
    str: "text",
    list[str]: "a list of texts",
    type(None): "null",
    PositiveInt: "an integer >= 1",
    NonNegativeInt: "an integer >= 0",
    PositiveFloat: "a number > 0",
    NonNegativeFloat: "a number >= 0",
}


def _said(message: str) -> str:
    """What the parser says of a field's value, in one sentence with what is accepted; anything else as it is."""
    shown = r"(?:[Vv]alue: |base 10: |to float: |Int: |Float: )(?P<value>.+?)(?: does not conform .*)?"
    match = re.fullmatch(rf'(?P<where>.*?)Parser key "(?P<name>[\w.]+)": .*{shown}', message)
    if match is None:
        return message
    hint: Any = JobConfig
    for part in match["name"].split("."):
        hint = get_type_hints(hint)[part]
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    accepted = [_KINDS.get(kind) or " or ".join(map(str, get_args(kind))) for kind in kinds]
    name, value = match["name"], match["value"]
    said = f"{name} is {value}; accepted is {' or '.join(accepted)}"
    return match["where"] + said
