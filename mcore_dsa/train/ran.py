"""What a run runs with beside its configuration: settings, kernels, versions, device. Kept at each start, compared at
the next, because they reach the bits of a loss and stand in no file that a run is given.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mcore_dsa import __version__
from mcore_dsa.backends import Target, choose
from mcore_dsa.settings import ATTEND_SHARD_VARIABLE, read_settings
from mcore_dsa.train.config import JobConfig
from mcore_dsa.workspace import device_bytes

STARTS = "starts.jsonl"


def what_runs(config: JobConfig) -> dict[str, str]:
    """Equal for two processes if nothing but the configuration tells them apart."""
    cuda, model = torch.cuda.is_available(), config.model
    device = torch.device("cuda" if cuda else "cpu")
    settings = read_settings(device_bytes=device_bytes(device))
    target = Target.of(
        device,
        torch.bfloat16 if config.training.dtype == "bf16" else torch.float32,
        heads=model.dsa_indexer_n_heads,
        dim=model.dsa_indexer_head_dim,
        channels=model.kv_lora_rank,
    )
    return {
        **settings.describe(),
        "kernels": choose(settings.kernels.value, target).backend.name,
        "device": torch.cuda.get_device_name() if cuda else f"CPU with {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
        "mcore_dsa": __version__,
        "torch": torch.__version__,
        "megatron-core": _version("megatron-core"),
        "triton": _version("triton"),
        "python": platform.python_version(),
    }


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What of both differs, with its values, and whether it can reach a bit of the training; empty where nothing."""
    names = [name for name in now if now[name] != before.get(name, now[name])]
    said = "; ".join(f"{name} is {now[name]}, was {before[name]}" for name in names)
    # No other setting changes a bit, which is what they promise.
    reach = set(names) - (read_settings({}).describe().keys() - {ATTEND_SHARD_VARIABLE})
    return said + (": losses may not be those of an uninterrupted run to the last bit" if reach else "")


def note_start(config: JobConfig, run_dir: Path, done: int) -> None:
    """Add a line about this start to the run's folder; for rank 0.

    Raises: OSError where it cannot be written.
    """
    start = {
        "first_step": done + 1,
        "steps": config.training.steps,
        "ranks": dist.get_world_size(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "ran": what_runs(config),
    }
    with (run_dir / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"
