"""The selections of a Megatron model's k-pool DSA layers, recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor, nn

from mcore_dsa.megatron import recompute
from mcore_dsa.megatron.attention import KPoolDSAttention
from mcore_dsa.record import SelectionRecord
from mcore_dsa.replay import Missing, Recorder, Replay, Replayed, VerifiedReplay, recomputing
from mcore_dsa.source import SelectionRequest, SelectionSource
from mcore_dsa.verified import Verified


class ModelSelections:
    """Records and replays what a model's k-pool DSA layers select.

    Layers are counted over the whole pipeline by one exchange of all its ranks: make this once, before any schedule
    runs. From then on it stands between the modules and the sources that they have.

    Args:
        model: the model, or the chunks of this pipeline stage, wrapped or not.
        pg_collection: the model's groups; by default Megatron's own.

    Raises: ValueError where the pipeline holds no such layer, or several of one number.
    """

    def __init__(
        self, model: nn.Module | Sequence[nn.Module], pg_collection: ProcessGroupCollection | None = None
    ) -> None:
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        chunks = [model] if isinstance(model, nn.Module) else list(model)
        modules = [part for chunk in chunks for part in chunk.modules() if isinstance(part, KPoolDSAttention)]
        told: list[Any] = [None] * groups.pp.size()
        dist.all_gather_object(told, [module.layer_number for module in modules], group=groups.pp)
        # A hybrid stack counts its other layers too: a layer's number says the order alone.
        numbers = sorted(chain.from_iterable(told))
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(f"the k-pool DSA layers of the pipeline are {numbers}; accepted are some, each once")
        self._groups: dict[str, Any] = {"tp_group": groups.tp, "cp_group": groups.cp, "pp_group": groups.pp}
        self._device = next(chain.from_iterable(chunk.parameters() for chunk in chunks)).device
        self._layers = len(numbers)
        self._seated = [part.source for part in modules]
        self._seats = [(numbers.index(part.layer_number), part, _Own(part.source)) for part in modules]
        self._replay: Replay | None = None
        self._recorder: Recorder | None = None
        self._seat()

    @contextmanager
    def replaying(self, record: SelectionRecord, *, missing: Missing = "refuse") -> Iterator[None]:
        """Forwards inside take their selections from `record` and run no projection of an indexer.

        Where several micro-batches are in flight, each forward step opens its own: Megatron's checkpoints recompute a
        forward with the record it began with, closed or not. Other checkpoints recompute with what is open in backward,
        and raise where nothing is.

        Args:
            missing: what becomes of rows that see pools and have no record, see `Replay`.

        Raises: what is wrong with the record, its first forward raises on every rank: ValueError, also for a record
        that is not the same on all of them.
        """
        with self._with(Replay(record=record, missing=missing, layers=self._layers), self._recorder):
            yield

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Forwards inside are recorded, whatever gives their selections; `Recorder.finish` makes records of them."""
        recorder = Recorder(self._layers, device=self._device, **self._groups)
        with self._with(self._replay, recorder):
            yield recorder

    @contextmanager
    def _with(self, replay: Replay | None, recorder: Recorder | None) -> Iterator[None]:
        before = self._replay, self._recorder
        self._replay, self._recorder = replay, recorder
        self._seat()
        try:
            yield
        finally:
            self._replay, self._recorder = before
            self._seat()

    def _seat(self) -> None:
        if any(part.source is not seated for (_, part, _), seated in zip(self._seats, self._seated, strict=True)):
            raise RuntimeError(
                "the source of a layer is another's by now; accepted is one ModelSelections for a model, which nobody "
                "else gives sources while it is used"
            )
        for layer, module, own in self._seats:
            source: SelectionSource = own
            if self._replay is not None:
                source = Replayed(replay=self._replay, layer=layer, fallback=own.source)
                if isinstance(own.source, Verified):
                    source = VerifiedReplay(source, own.source)
                # A forward that begins without gradients is never recomputed.
                source = _Counted(source, own) if torch.is_grad_enabled() else source
            module.source = source if self._recorder is None else self._recorder.around(source, layer)
        self._seated = [part.source for _, part, _ in self._seats]


@dataclass(eq=False)
class _Own:
    """The source that a module had, which does not answer for a forward that replayed.

    Attributes:
        replays: forwards outside Megatron's checkpoints that replayed, less their recomputations that did.
        carried: forwards inside them that replayed; another checkpoint around those recomputes without their record.
    """

    source: SelectionSource
    replays: int = 0
    carried: int = 0

    @property
    def identity(self) -> str:
        return self.source.identity

    def own_rows(self, request: SelectionRequest) -> Tensor:
        carrier = recompute.current()
        replays = self.replays if carrier is None else (self.replays + self.carried) * carrier.born_again
        if replays > 0 and recomputing():
            raise RuntimeError(
                f"layer {request.layer} recomputes without a record, and {replays} of its forwards replayed one; "
                "accepted is backward inside `replaying`, or a checkpoint of megatron.core.tensor_parallel with "
                "mcore_dsa.patches applied"
            )
        return self.source.own_rows(request)


@dataclass(frozen=True, eq=False)
class _Counted:
    """A replaying source that tells the module's own of each forward which only an open record can recompute."""

    source: SelectionSource
    own: _Own

    @property
    def identity(self) -> str:
        return self.source.identity

    def own_rows(self, request: SelectionRequest) -> Tensor:
        carrier = recompute.current()
        if carrier is None:
            self.own.replays += -1 if recomputing() else 1
        elif not carrier.again:
            self.own.carried += 1
        return self.source.own_rows(request)
