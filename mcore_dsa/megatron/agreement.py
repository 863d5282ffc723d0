"""One module's part in the agreement of all ranks that it meets, before its first selection and after each change."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Hashable
from dataclasses import fields
from typing import cast

import torch
from megatron.core.package_info import VERSION
from torch import Tensor

from mcore_dsa import __version__
from mcore_dsa.agreement import SelectionContract, agree, differing_replica, newly_agreed, weights_digest
from mcore_dsa.backends import Backend, Choice
from mcore_dsa.collectives import greatest
from mcore_dsa.megatron.config import KPoolDSATransformerConfig
from mcore_dsa.megatron.indexer import KPoolDSAIndexer
from mcore_dsa.precision import user_precision
from mcore_dsa.settings import ATTEND_BYTES_VARIABLE, PARTITION_VARIABLE, SCORE_BYTES_VARIABLE, Settings

_log = logging.getLogger("mcore_dsa.megatron")
# Its `__version__` ends in the commit of whatever repository Megatron is installed inside of, on hosts that have git.
_MEGATRON = ".".join(map(str, VERSION[:3])) + "".join(map(str, VERSION[3:]))


class Agreement:
    """Holds one attention module's contract against those of the other ranks."""

    def __init__(
        self,
        config: KPoolDSATransformerConfig,
        settings: Settings,
        kernels: Choice,
        tp_group: torch.distributed.ProcessGroup,
        cp_group: torch.distributed.ProcessGroup | None,
    ) -> None:
        self._config, self._settings, self._kernels, self._tp_group = config, settings, kernels, tp_group
        self._groups = [tp_group] if cp_group is None else [tp_group, cp_group]
        names = {field.name for field in fields(config)}
        self._of_config = [field.name for field in fields(SelectionContract) if field.name in names]
        self._agreed: Hashable = None

    def hold(
        self,
        query_SBHC: Tensor,
        indexer: KPoolDSAIndexer,
        softmax_scale: float | None,
        *,
        source: str,
        documents: str,
        rows: str,
        lacks: bool,
    ) -> bool:
        """Agree, if on any rank something changed since the last time; every forward asks every rank.

        What only one rank knows (another number of threads, weights loaded anew, an indexer that learns) must not leave
        the others waiting in a later collective.

        Args:
            query_SBHC, indexer, softmax_scale: what the module is to select and attend with.
            source: `identity` of the source that would be asked. It may be another in every call: all ranks having the
                same one is found without agreeing on all the rest; so with the next two.
            documents: `SelectionPlan.documents`. rows: `Batch.described`.
            lacks: whether this rank has no selection for this call yet.

        Returns: whether any rank has none.

        Raises: ValueError on every rank, with what differs and what is wrong on any of them.
        """
        backend = self._kernels.backend
        weights = (
            (parameter.data_ptr(), parameter._version, parameter.dtype, parameter.requires_grad)
            for parameter in indexer.parameters()
        )
        of_config = (getattr(self._config, name) for name in self._of_config)
        numerics = backend.numerics(query_SBHC.device), user_precision(), indexer.k_norm.eps
        now = (backend, *numerics, softmax_scale, *of_config, *weights)
        number = int.from_bytes(hashlib.blake2b(f"{source}; {documents}; {rows}".encode(), digest_size=7).digest())
        changed, any_lacks, most, least = greatest(
            [now != self._agreed, lacks, number, -number], self._groups, query_SBHC.device
        )
        if changed or most != -least:
            faults, told = [*self._settings.faults, *_learning(indexer), *_not_finite(indexer)], {}
            faults += [self._kernels.fault] if self._kernels.fault else []
            try:
                faults += self._budget_faults(query_SBHC, backend, indexer)
                bits = backend.fingerprint(query_SBHC.device, indexer.heads, indexer.head_dim)
                told = self._contract(backend, bits, indexer, softmax_scale, source, documents, rows).describe()
            # Whatever it is: the others wait in the next line, and have to hear of it.
            except Exception as error:
                faults.append(str(error) or type(error).__name__)
            agree(told, faults, *self._groups)
            self._agreed = now
            self._tell()
        return bool(any_lacks)

    def refuse(self, error: Exception, device: torch.device) -> None:
        """Tell the others, who wait in `hold`, what a call of this rank cannot be done for; alone, nothing.

        Raises: ValueError on every rank, with what was told.
        """
        if any(group.size() > 1 for group in self._groups):
            greatest([True, True, 0, 0], self._groups, device)
            agree({}, [str(error)], *self._groups)

    def _contract(
        self,
        backend: Backend,
        bits: str,
        indexer: KPoolDSAIndexer,
        softmax_scale: float | None,
        source: str,
        documents: str,
        rows: str,
    ) -> SelectionContract:
        of_config = {name: getattr(self._config, name) for name in self._of_config}
        of_module = {
            "settings": self._settings,
            "versions": f"mcore_dsa {__version__}, torch {torch.__version__}, Megatron {_MEGATRON}",
            "softmax_scale": softmax_scale,
            "backend": f"{backend.name}, {bits}",
            "products": f"fp32 in {user_precision()}",
            "dsa_indexer_k_norm_epsilon": indexer.k_norm.eps,
            "weights": weights_digest(indexer.named_parameters()),
            "source": source,
            "documents": documents,
            "rows": rows,
        }
        return SelectionContract(**{**of_config, **of_module})

    def _budget_faults(self, query_SBHC: Tensor, backend: Backend, indexer: KPoolDSAIndexer) -> list[str]:
        config, (_, batch, heads, channels) = self._config, query_SBHC.shape
        if self._settings.attend_shard.value == "rows":
            heads *= self._tp_group.size()
        pool_size = cast(int, config.dsa_indexer_kpool)
        tail = pool_size - 1 if config.dsa_indexer_kpool_always_select_tail else 0
        least = {
            SCORE_BYTES_VARIABLE: backend.smallest_score_bytes(
                query_SBHC.device, indexer.heads, indexer.head_dim, config.dsa_indexer_pool_budget
            ),
            ATTEND_BYTES_VARIABLE: backend.smallest_attend_bytes(
                batch=batch,
                heads=heads,
                channels=channels,
                dtype=query_SBHC.dtype,
                slots=config.dsa_indexer_pool_budget * pool_size + tail,
            ),
        }
        return [
            f"{setting.name} is {setting.value}; accepted for this geometry is {least[setting.name]} or more"
            for setting in (self._settings.score_bytes, self._settings.attend_bytes)
            if setting.value < least[setting.name]
        ]

    def _tell(self) -> None:
        """Log what runs, once for the run, and where another tensor-parallel group runs with other settings."""
        settings = self._settings.describe()
        number = newly_agreed(settings, self._tp_group)
        if not number or self._tp_group.rank() != 0:
            return
        try:
            if differs := differing_replica(settings, number):
                _log.warning("tensor-parallel groups run with different settings: %s", differs)
        except Exception as error:
            # Whatever a store raises: training goes on without it, and this comparison is for the log alone.
            _log.warning("settings are not compared with those of other tensor-parallel groups: %s", error)
        # Every tensor-parallel group agrees; what the first of them says holds for all.
        if torch.distributed.get_rank() != 0:
            return
        partition, kernels = self._settings.partition, self._settings.kernels
        if partition.value == "off":
            done = "every rank scores every row"
        elif self._tp_group.size() == 1:
            _log.warning(
                "%s has no effect in a tensor-parallel group of one (%s)", PARTITION_VARIABLE, partition.reason
            )
            done = "the one rank scores every row"
        else:
            done = f"each rank scores its {partition.value} shard of the rows"
        ranks = torch.distributed.get_process_group_ranks(self._tp_group)
        _log.info("k-pool DSA over tensor-parallel ranks %s: %s (%s)", ranks, done, partition.reason)
        shard = self._settings.attend_shard
        attends = {"heads": "its heads of every row", "rows": "its rows with all heads"}[shard.value]
        _log.info("k-pool DSA attends on each rank %s (%s)", attends, shard.reason)
        reason = "; ".join(filter(None, (kernels.reason, self._kernels.reason)))
        _log.info("k-pool DSA computes with %s (%s)", self._kernels.backend.name, reason)
        others = [setting for setting in self._settings if setting not in (partition, shard, kernels)]
        _log.info("k-pool DSA runs with %s", ", ".join(map(str, others)))


def _learning(indexer: KPoolDSAIndexer) -> list[str]:
    names = [name for name, parameter in indexer.named_parameters() if parameter.requires_grad]
    return [f"requires_grad is True on the indexer's {', '.join(names)}; accepted is False, frozen"] if names else []


def _not_finite(indexer: KPoolDSAIndexer) -> list[str]:
    """Scores of such weights rank below all others, so that nothing else would tell of them."""
    names = [name for name, parameter in indexer.named_parameters() if not parameter.isfinite().all()]
    return [f"the indexer's {', '.join(names)} is not finite; accepted are finite weights"] if names else []
