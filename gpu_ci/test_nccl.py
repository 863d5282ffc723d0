"""Ranks with a device each, over NCCL: selection, training, agreement and the job, as over gloo on the CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import megatron_ranks, run_ranks
from models import BATCH, OFF, ON, POOL, ROWS, TOPK
from test_megatron_equality import PARTITIONS, assert_same_training, assert_worth_comparing, train_ten
from test_megatron_flag import DIFFERENT, assert_observed, attempt, gathers, observe
from test_megatron_one_device import ON_CUDA, PRECISIONS, TIMEOUT_S
from test_one_device import over_ranks

from mcore_dsa.settings import PARTITION_VARIABLE

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices, there are {DEVICES}")

ROOT = Path(__file__).parents[1]
NCCL: dict[str, Any] = {"backend": "nccl", "device": "cuda", "timeout": TIMEOUT_S}
FAULTS = ("word on one rank", "two partitions", "score bytes", "bits")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_select_as_one_does(ranks: int) -> None:
    if ranks > DEVICES:
        pytest.skip(f"needs {ranks} CUDA devices, there are {DEVICES}")
    run_ranks(over_ranks, ranks, "cuda", **NCCL)


@PRECISIONS
def test_flag_on_trains_bit_identically_to_flag_off(precision: dict[str, Any]) -> None:
    off = megatron_ranks(train_ten, 2, ON_CUDA | precision, tp=2, env=OFF, **NCCL)
    assert_worth_comparing(off, 2)
    for partition in PARTITIONS:
        on = megatron_ranks(train_ten, 2, ON_CUDA | precision, tp=2, env={PARTITION_VARIABLE: partition}, **NCCL)
        assert_same_training(off, on, partition)
        assert sum(run.scored_rows for run in on) == off[0].scored_rows


def test_flag_on_gathers_keys_and_selections_and_nothing_else() -> None:
    own = ROWS // 2
    for rank, seen in enumerate(megatron_ranks(observe, 2, tp=2, env=ON, **NCCL)):
        selected = ((BATCH, own, TOPK // POOL), torch.int32)
        assert_observed(seen, gathers(own, [0, 1], selected), range(own * rank, own * (rank + 1)))


@pytest.mark.parametrize("different", [case for case in DIFFERENT if case[0] in FAULTS], ids=lambda case: case[0])
def test_ranks_that_disagree_all_raise(different: tuple[str, list[dict[str, str | None]], list[str]]) -> None:
    fault, envs, parts = different
    for where, said in megatron_ranks(attempt, 2, fault, tp=2, env=envs, **NCCL):
        assert where == "forward"
        assert all(part in message for message in said for part in parts), said


def test_the_job_has_the_losses_of_an_unsharded_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    job = ["-m", "mcore_dsa.train", "--config", "configs/tiny_tp2.yaml", "--run_dir", str(tmp_path / "run")]
    options = ["--training.steps", "12", "--compare-unsharded", "--logging.progress", "false"]
    environment = {**os.environ, **ON}
    done = subprocess.run(
        [*command, *job, *options], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["flag"], summary["group_size"]) == ("contiguous", 2)
    assert summary["unsharded_losses_bit_identical"] is True
    assert summary["last_loss"] < summary["first_loss"]
