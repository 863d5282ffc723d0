"""Runs of the training job on a tiny model, for tests."""

import inspect
import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import run_ranks
from torch import Tensor, nn

from mcore_dsa.train.config import JobConfig, parse_config

ROOT = Path(__file__).parents[1]
FLAG = "SKYRL_DSA_INDEXER_TP_SHARD"

# Sequences are four times index_topk, so that selection drops tokens.
TINY = shlex.split("""
--model.num_layers 2 --model.hidden_size 32 --model.ffn_hidden_size 64 --model.num_attention_heads 4
--model.q_lora_rank 16 --model.kv_lora_rank 16 --model.qk_head_dim 8 --model.v_head_dim 8
--model.dsa_indexer_n_heads 8 --model.dsa_indexer_head_dim 8 --model.dsa_indexer_topk 8 --model.hidden_dropout 0.1
--training.sequence_length 32 --training.micro_batch_size 2 --training.global_batch_size 4
--training.steps 4 --training.warmup_steps 1 --training.decay_steps 4
--checkpoint.save_every 0 --logging.progress false --logging.tensorboard false --max_data_bytes 20000
""")


def tiny(run_dir: Path, *options: str) -> JobConfig:
    arguments = ["--config", str(ROOT / "configs/tiny_tp2.yaml"), *TINY, "--run_dir", str(run_dir)]
    return parse_config([*arguments, *shlex.split(" ".join(options))])


def write_files(folder: Path, *, count: int = 120) -> Path:
    """The paragraphs of a module of the standard library as files of their own, one of them empty and one a byte."""
    folder.mkdir()
    for number, text in enumerate(["", "x", *Path(inspect.__file__).read_text().split("\n\n")][:count]):
        (folder / f"{number:03}.txt").write_text(text)
    return folder


def write_indexed(prefix: Path, documents: list[list[int]], dtype: type = np.uint16) -> str:
    """Each document in two sequences, as a splitter of sentences would leave it."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_item(torch.tensor(document[:2]))
        builder.add_item(torch.tensor(document[2:]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir: Path) -> list[float]:
    return [line["loss"] for line in metrics(run_dir)]


def run(config: JobConfig) -> dict[str, Any]:
    """Train in ranks that the harness started: what each of them does."""
    from mcore_dsa import patches
    from mcore_dsa.train.job import prepare, train

    patches.apply()
    return asdict(train(prepare(config, torch.distributed.get_world_size())))


def refusals(configs: list[JobConfig]) -> list[str]:
    """What each run is refused with, or ends with, in ranks that the harness started."""
    told = []
    for config in configs:
        try:
            run(config)
        except (ValueError, RuntimeError) as error:
            told.append(str(error))
    return told


def start(config: JobConfig, ranks: int = 2) -> dict[str, Any]:
    """Run it on new ranks; the summary, which all of them have to agree on but for times."""
    summaries = run_ranks(run, ranks, config, env={FLAG: "1"})
    times = {"tokens_per_s", "indexer_share"}
    assert all(
        {key: value for key, value in summary.items() if key not in times}
        == {key: value for key, value in summaries[0].items() if key not in times}
        for summary in summaries
    )
    return summaries[0]


def trainer_of(config: JobConfig) -> tuple[Any, str]:
    """In ranks with Megatron's groups: the trainer of a run, and the digest of its text."""
    from mcore_dsa.train.job import prepare
    from mcore_dsa.train.loop import Trainer

    job = prepare(config, torch.distributed.get_world_size())
    return Trainer(config, job.samples, torch.device("cpu")), job.corpus.digest


def whole(name: str, parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """A parameter's value or gradient over the tensor-parallel group, of this rank's `shard` of it."""
    from models import gathered

    if not getattr(parameter, "tensor_model_parallel", False):
        return shard.clone()
    # A gated unit's first layer holds two halves, each of them sharded.
    parts = shard.chunk(2) if name.endswith("linear_fc1.weight") else (shard,)
    return torch.cat([gathered(part, parameter.partition_dim) for part in parts])
