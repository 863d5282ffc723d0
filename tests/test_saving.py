"""What is not published: weights that are not finite, or that no step can follow; the last good checkpoint stays."""

import errno
import gc
import hashlib
import io
import os
import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from harness import RanksFailed, megatron_ranks, run_ranks
from train_runs import FLAG, refusals, start, tiny, trainer_of

from mcore_dsa.train.config import JobConfig

ONE = "--training.steps 1 --training.warmup_steps 0"


def full_disk(*_: object) -> None:
    """At the end of a file."""
    raise OSError(errno.ENOSPC, "No space left on device")


@contextmanager
def full_disks() -> Iterator[Iterator[None]]:
    """One after the other: the last rank's file ends too soon, or at its end; rank 0's `.metadata`, `metadata.json`."""
    from mcore_dsa.train import digesting

    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    fsync, save_config = os.fsync, digesting.save_config
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def second(descriptor: int) -> None:
        os.fsync = full_disk
        fsync(descriptor)

    def each() -> Iterator[None]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000 if rank == last else soft, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        # What the failed write left behind.
        gc.collect()
        os.fsync = full_disk if rank == last else fsync
        yield
        os.fsync = second if rank == 0 else fsync
        yield
        os.fsync = fsync
        digesting.save_config = full_disk if rank == 0 else save_config
        yield

    try:
        yield each()
    finally:
        os.fsync, digesting.save_config = fsync, save_config


def test_what_cannot_be_written_is_held_by_no_traceback() -> None:
    class Full:
        def write(self, data: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    from mcore_dsa.train.digesting import _Digested

    data = io.BytesIO(bytes(100))
    with pytest.raises(OSError, match="No space") as raised:
        _Digested(Full(), hashlib.sha256()).write(data.getbuffer())
    # It would refuse, with a buffer of it in use.
    data.close()
    assert raised.value.__traceback__ is not None


def damages(config: JobConfig) -> list[str]:
    """Steps of one run whose weights, optimizer or disk is damaged on one rank before a checkpoint."""
    from mcore_dsa.train.checkpointing import save_checkpoint
    from mcore_dsa.train.stored import latest_checkpoint

    trainer, digest = trainer_of(config)
    rank, last = torch.distributed.get_rank(), torch.distributed.get_world_size() - 1
    run_dir, told = Path(config.run_dir), []

    def save() -> None:
        try:
            save_checkpoint(trainer, run_dir, digest)
        except (RuntimeError, ValueError) as error:
            told.append(str(error))
        else:
            told.append("")

    trainer.train_step()
    save()
    # One would outlive a rank that is killed.
    assert psutil.Process().children() == []
    trainer.train_step()
    indexer = dict(trainer.chunks[0].named_parameters())
    frozen = next(weight for name, weight in indexer.items() if name.endswith("indexer.linear_wk.weight"))
    moment = next(iter(trainer.optimizer.chained_optimizers[0].optimizer.state.values()))["exp_avg_sq"]
    # Of a whole replica, where there are two: its tensor-parallel ranks agree.
    replica = {last} if last == 1 else {last - 1, last}
    for tensor, value, where in ((frozen, torch.nan, {last}), (moment, torch.inf, {last}), (frozen, 0.25, replica)):
        before = tensor.data.view(-1)[0].item()
        if rank in where:
            # As corrupted memory would: neither the version nor the address of the weight changes.
            tensor.data.view(-1)[0] = value
        save()
        tensor.data.view(-1)[0] = before
    states = torch.get_rng_state()
    with full_disks() as disks:
        for _ in disks:
            save()
    # Rank 0 removes what it cannot publish, after it has told the others.
    assert rank or not (run_dir / "checkpoints" / "step_00000002").exists()
    assert latest_checkpoint(run_dir).step == 1
    assert torch.equal(torch.get_rng_state(), states)
    save()
    assert latest_checkpoint(run_dir).step == 2
    return told


@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 2)])
def test_a_checkpoint_that_cannot_be_gone_on_from_is_not_published(ranks: int, tp: int, tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", "--training.micro_batch_size 1")
    all_told = megatron_ranks(damages, ranks, config, tp=tp, env={FLAG: "1"})
    assert all(told == all_told[0] for told in all_told)
    first, frozen, moment, replica, disk, at_end, *metadata, second = all_told[0]
    assert (first, second) == ("", "")
    name = "model.decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight"
    assert frozen == (
        f"weights after step 2: {name} is not finite on ranks [{ranks - 1}]; accepted are finite numbers alone"
    )
    assert "exp_avg_sq of the optimizer is not finite on ranks" in moment
    others, those = ("0", "1") if ranks == 2 else ("0", "2")
    digest = r"'[0-9a-f]{16}' on ranks"
    assert re.match(
        rf"drift between replicas of weights: {name[6:]} is {digest} \[{others}\], {digest} \[{those}\]; ", replica
    )
    for told in (disk, at_end):
        assert told.startswith(f"the checkpoint in {tmp_path}/run/checkpoints/step_00000002 cannot be written, ")
        assert " bytes are free there: " in told
    written = f"the checkpoint in {tmp_path}/run/checkpoints/step_00000002 cannot be written: No space left on device"
    assert metadata == [written, written]


def test_weights_that_no_step_can_follow_are_not_published(tmp_path: Path) -> None:
    """Each step moves a weight by about the learning rate: 1e9 is finite, and what comes of it is not."""
    with pytest.raises(RanksFailed, match=r"RuntimeError: .*(found (NaN|Inf)|the loss after step 1 is nan)"):
        start(tiny(tmp_path, "--training.lr 1e9", ONE))
    assert not list((tmp_path / "checkpoints").glob("*"))


def load_a_frozen_weight(value: float) -> str:
    """What a forward says of an indexer that was loaded with one, by whatever means that moves its version."""
    from train_runs import tiny as config_of

    trainer, _ = trainer_of(config_of(Path("unused")))
    trainer.train_step()
    weights = dict(trainer.chunks[0].named_parameters())
    frozen = next(weight for name, weight in weights.items() if name.endswith("indexer.linear_wk.weight"))
    if torch.distributed.get_rank() == 1:
        with torch.no_grad():
            frozen.view(-1)[3] = value
    try:
        trainer.train_step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_frozen_weight_that_is_not_finite_is_told_to_every_rank(value: float) -> None:
    for told in megatron_ranks(load_a_frozen_weight, 2, value, tp=2, env={FLAG: "1"}):
        assert "rank 1: the indexer's linear_wk.weight is not finite; accepted are finite weights" in told


def start_anew(config: JobConfig, flag_of_last: str) -> Any:
    from train_runs import run

    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        os.environ[FLAG] = flag_of_last
    return run(config)


def beside_a_job(configs: list[JobConfig]) -> list[str]:
    """What runs are told in the folder of a job that lives."""
    from mcore_dsa.train.run_dir import owned

    with owned(Path(configs[0].run_dir)):
        return refusals(configs)


def test_what_is_refused_leaves_an_earlier_run_in_its_place(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    start(tiny(run_dir, ONE))
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != "lock"}
    lines = run_ranks(beside_a_job, 2, [tiny(run_dir, ONE), tiny(run_dir, ONE, "--resume auto")])[0]
    assert [" owns; accepted is the folder of no running job" in line for line in lines] == [True, True]
    for options, flag, told in (
        ("", "bogus", "SKYRL_DSA_INDEXER_TP_SHARD is 'bogus'; accepted are"),
        # Attention's weights of 1e30 overflow in the first forward.
        ("--model.init_method_std 1e30", "1", "found NaN|not finite"),
    ):
        with pytest.raises(RanksFailed, match=told):
            run_ranks(start_anew, 2, tiny(run_dir, ONE, options), flag, env={FLAG: "1"})
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
        assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*") if path.name != "lock"} == before
