"""Model, optimizer and schedule of one run on this rank, and one training step of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, get_canonical_lr_for_logging
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from mcore_dsa.binding import CheckpointBinding
from mcore_dsa.megatron import check_replicas
from mcore_dsa.settings import read_settings
from mcore_dsa.train.config import JobConfig, TrainingConfig
from mcore_dsa.train.counts import RankCounts, model_flops
from mcore_dsa.train.model import attentions, build_chunks
from mcore_dsa.train.pretrained import load_pretrained
from mcore_dsa.train.samples import MicroBatch, Packs, Place, Windows, micro_batches


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one step did; equal on every rank but for the times, which are this rank's.

    Attributes:
        step: number of the step, from 1.
        loss: mean over the counted tokens of the global batch, before the step's update.
        learning_rate: of the step's update.
        gradient_norm: before clipping.
        stop: whether any rank was asked to stop before the end of the step.
        seconds: wall time of the step.
        indexer_seconds: of them, in projections and selection of the indexers on this rank; on CUDA the time it took
            to launch them.
        counts: what each rank did, in the order of ranks.
        flops: model FLOPs of the step, all ranks together.
        evaluation_loss: mean over the evaluation set after the step, where it was taken.
        selection_agreement: where selections were recorded after the step, the share of the pools recorded before that
            the same rows select still: how much of that record a replay would have kept.
    """

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    stop: bool
    seconds: float
    indexer_seconds: float
    counts: tuple[RankCounts, ...]
    flops: int
    evaluation_loss: float | None = None
    selection_agreement: float | None = None


class Trainer:
    """One run on this rank.

    Megatron's groups have to exist; its random states are seeded here. Equal arguments on equal groups give equal
    weights and, step by step, equal losses to the last bit. `pretrained` replaces the attention's initial weights.
    `stop` says whether this rank has been asked to stop; it is asked at the end of each step.

    Attributes:
        step: steps done.
        chunks: this rank's model chunks.
        optimizer: Megatron's distributed optimizer over them.
        scheduler: Megatron's schedule of the learning rate.
    """

    def __init__(
        self,
        config: JobConfig,
        samples: Windows | Packs,
        device: torch.device,
        *,
        pretrained: CheckpointBinding | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config = config
        self._stop = stop
        self.step = 0
        self._samples = samples
        self._device = device
        # As Megatron does: stages of a pipeline draw different weights, data-parallel ranks the same.
        seed = config.training.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.chunks = build_chunks(config)
        if pretrained is not None:
            # Before the optimizer copies the weights into its own.
            load_pretrained(self.chunks, config.model, pretrained)
        self._attentions = attentions(self.chunks)
        self.optimizer = get_megatron_optimizer(_optimizer_config(config.training), self.chunks)
        self.scheduler = _scheduler(config.training, self.optimizer)
        self._compared_every = read_settings().drift_every.value
        self.check_replicas()
        # All chunks share one configuration, and Megatron's schedules look there for these.
        shared = self.chunks[0].config
        shared.grad_scale_func = self.optimizer.scale_loss
        shared.finalize_model_grads_func = finalize_model_grads

    def train_step(self) -> StepReport:
        """One step: forward and backward over the global batch, reduced gradients, an update.

        Raises: RuntimeError where a gradient is not finite; as `check_replicas`, as often as the drift watch compares.
        """
        started, before = time.perf_counter(), RankCounts.so_far(self._attentions)
        training = self.config.training
        batch = range(self.step * training.global_batch_size, (self.step + 1) * training.global_batch_size)
        self._clear_gradients()
        count = self.config.micro_batches(dist.get_world_size())
        sums = self._run_schedule(self._samples, batch.start, count, forward_only=False)
        if self._compared_every and (self.step + 1) % self._compared_every == 0:
            # The update gives every rank the weights of the rank that owns them, and hides what a gradient came from.
            self.check_replicas()
        # Before the update, so that the warm-up does not spend its first step at a rate of zero.
        self.scheduler.step(1)
        _, gradient_norm, _ = self.optimizer.step()
        loss, stopped = _over_all_ranks(sums, self._device, stop=self._stop())
        self.step += 1
        own = RankCounts.so_far(self._attentions).since(before)
        counts = own.of_all_ranks(self._device)
        return StepReport(
            step=self.step,
            loss=loss,
            learning_rate=get_canonical_lr_for_logging(self.optimizer.param_groups),
            gradient_norm=float(gradient_norm),
            stop=stopped,
            seconds=time.perf_counter() - started,
            indexer_seconds=1e-6 * own.indexer_us,
            counts=counts,
            flops=model_flops(self.config, [length for sample in batch for length in self._samples.lengths(sample)]),
        )

    @torch.no_grad()
    def evaluate(self, samples: Windows | Packs, count: int) -> float:
        """The mean loss over the counted tokens of the first `count` micro batches of `samples` on each rank.

        Nothing that the training depends on moves: without dropout no random number is drawn.
        """
        for chunk in self.chunks:
            chunk.eval()
        sums = self._run_schedule(samples, 0, count, forward_only=True)
        for chunk in self.chunks:
            chunk.train()
        return _over_all_ranks(sums, self._device)[0]

    def next_loss(self) -> float:
        """The loss of the samples that come next, forward and backward, without an update.

        Of a micro batch for each pipeline stage; random states move on, and gradients are left for the next step to
        clear. What the ranks hold alike is compared, however long it is to the next time.

        Raises: RuntimeError where a gradient is not finite; ValueError where ranks have come apart.
        """
        for attention in self._attentions:
            attention.watch.compare_next()
        self._clear_gradients()
        # The interleaved schedule wants as many as there are stages.
        count = min(self.config.parallel.pipeline, self.config.micro_batches(dist.get_world_size()))
        first = self.step * self.config.training.global_batch_size
        sums = self._run_schedule(self._samples, first, count, forward_only=False)
        return _over_all_ranks(sums, self._device)[0]

    def named_chunks(self) -> list[tuple[str, Any]]:
        """This rank's model chunks without their wrappers, by the names they have in a checkpoint."""
        if len(self.chunks) == 1:
            return [("model", self.chunks[0].module)]
        return [(f"model{index}", chunk.module) for index, chunk in enumerate(self.chunks)]

    def check_replicas(self) -> None:
        """Make sure that ranks which hold the same weights hold the same bits; every rank has to call this.

        Raises: ValueError on every rank, naming weights and ranks.
        """
        check_replicas([chunk for _, chunk in self.named_chunks()])

    def _clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _run_schedule(
        self, samples: Windows | Packs, first_sample: int, count: int, *, forward_only: bool
    ) -> list[Tensor]:
        """What `_loss` reports of each micro batch, on the last pipeline stage; nothing on the others."""
        training = self.config.training
        iterators = [self._micro_batches(samples, first_sample, count) for _ in self.chunks]
        run = get_forward_backward_func()
        sums: list[Tensor] = run(
            forward_step_func=_forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=count,
            seq_length=training.sequence_length,
            micro_batch_size=training.micro_batch_size,
            forward_only=forward_only,
        )
        return sums

    def _micro_batches(self, samples: Windows | Packs, first_sample: int, count: int) -> Iterator[MicroBatch]:
        return micro_batches(
            samples,
            first_sample=first_sample,
            micro_batch_size=self.config.training.micro_batch_size,
            count=count,
            place=Place(
                data_rank=parallel_state.get_data_parallel_rank(),
                data_size=parallel_state.get_data_parallel_world_size(),
                context_rank=parallel_state.get_context_parallel_rank(),
                context_size=parallel_state.get_context_parallel_world_size(),
            ),
            device=self._device,
        )


def _optimizer_config(training: TrainingConfig) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        min_lr=training.min_lr,
        weight_decay=training.weight_decay,
        adam_beta1=training.adam_beta1,
        adam_beta2=training.adam_beta2,
        clip_grad=training.clip_grad,
        bf16=training.dtype == "bf16",
        params_dtype=torch.bfloat16 if training.dtype == "bf16" else torch.float32,
        use_distributed_optimizer=True,
    )


def _scheduler(training: TrainingConfig, optimizer: Any) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=training.lr,
        min_lr=training.min_lr,
        lr_warmup_steps=training.warmup_steps,
        lr_decay_steps=training.lr_decay_steps,
        lr_decay_style=training.decay_style,
        start_wd=training.weight_decay,
        end_wd=training.weight_decay,
        wd_incr_steps=training.steps,
        wd_incr_style="constant",
    )


def _forward_step(
    batches: Iterator[MicroBatch], model: torch.nn.Module
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """What Megatron's schedules call for each micro batch: the model's output, and how to get a loss from it."""
    batch = next(batches)
    output = model(batch.tokens_BL, batch.positions_BL, None, labels=batch.labels_BL, packed_seq_params=batch.packed)
    return output, partial(_loss, is_counted_BL=batch.is_counted_BL)


def _loss(loss_BL: Tensor, *, is_counted_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sum over counted tokens, their number, and both to report.

    Megatron divides the gradients of all micro batches by all their tokens. Of a mean and a report it would multiply
    the mean by the context-parallel ranks, and divide the gradients by the data-parallel ones alone.
    """
    total = loss_BL.masked_fill(~is_counted_BL, 0.0).sum()
    tokens = is_counted_BL.sum(dtype=torch.int32)
    return total, tokens, torch.stack([total.detach().double(), tokens.double()])


def _over_all_ranks(sums: list[Tensor], device: torch.device, *, stop: bool = False) -> tuple[float, bool]:
    """On every rank the mean over the tokens of all micro batches and ranks, and whether any rank says `stop`.

    In one reduction over all ranks, where tensor-parallel ranks hold equal sums, and pipeline stages but the last none.
    """
    total = torch.zeros(3, dtype=torch.float64, device=device)
    if sums and parallel_state.get_tensor_model_parallel_rank() == 0:
        total[:2] = torch.stack(sums).sum(dim=0)
    total[2] = stop
    dist.all_reduce(total)
    loss, tokens, stops = total.tolist()
    # A batch of documents of one token predicts nothing.
    return loss / max(tokens, 1.0), stops > 0
