"""Megatron's writer of distributed checkpoints: digests of the files of this rank made while they are written, no
process beside it, and the faults of one rank told to all.
"""

from __future__ import annotations

import hashlib
import io
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from mcore_dsa.train.together import told_to_every_rank

# A thread is worth its while for no less.
_ASIDE_BYTES = 2**20


class DigestingSave(TorchDistSaveShardedStrategy):
    """Saves as Megatron does, and knows the digests of what this rank wrote.

    Reading the files again took 9% of a save of 166 MB a rank, this takes 2%: a second thread digests what the first
    writes, and both let go of the interpreter. Should Megatron write in another way, `digests` lacks files, and is
    never wrong.

    Args:
        what: how a line begins that says what one rank could not write.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._digests: dict[str, Any] = {}
        self._unfinished: OSError | None = None

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 in hex by name of file, once the save is done."""
        return {name: digest.hexdigest() for name, digest in self._digests.items()}

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        """As Megatron's, but that what rank 0 writes alone at the end does not leave the others waiting.

        Raises: ValueError on every rank where rank 0 cannot write it.
        """
        # Between a writer and a reader in one process: Megatron's own is kept by a process of its own, which takes
        # seconds to start and is left behind by a rank that is killed.
        filesystem_async._results_queue = queue.Queue()
        super().save(sharded_state_dict, checkpoint_dir)
        with told_to_every_rank(self._what):
            if self._unfinished is not None:
                raise self._unfinished
            if dist.get_rank() == 0:
                # Megatron does so once more, with the others in a barrier.
                save_config(CheckpointingConfig(self.backend, self.version), str(checkpoint_dir))

    def transform_save_stream(self, write_item: Any, raw_stream: Any) -> tuple[io.IOBase, list[str]]:
        """What the writer asks of its transforms for each tensor: where to write it, here to the same file."""
        del write_item
        digest = self._digests.setdefault(Path(raw_stream.name).name, hashlib.sha256())
        return _Digested(raw_stream, digest), []

    def _get_save_and_finalize_callbacks(self, writer: Any, *arguments: Any) -> Any:
        writer.transforms = self
        writer.finish = self._kept(writer.finish)
        return super()._get_save_and_finalize_callbacks(writer, *arguments)

    def _kept(self, finish: Callable[..., None]) -> Callable[..., None]:
        """Writes `.metadata`, on rank 0, and leaves what it raises for `save`: the others are in a collective."""

        def run(*arguments: Any) -> None:
            try:
                finish(*arguments)
            except OSError as error:
                self._unfinished = error

        return run


class _Digested(io.IOBase):
    def __init__(self, file: Any, digest: Any) -> None:
        self._file, self._digest = file, digest

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            return self._written(data)
        except OSError:
            # The traceback that is kept holds it, in a cycle, and CPython (3.12.1) ends with SIGSEGV where it collects
            # a cycle with the buffer of a BytesIO in it.
            if isinstance(data, memoryview):
                data.release()
            raise

    def _written(self, data: Any) -> int:
        if memoryview(data).nbytes < _ASIDE_BYTES:
            self._digest.update(data)
            return int(self._file.write(data))
        with ThreadPoolExecutor(max_workers=1) as aside:
            digested = aside.submit(self._digest.update, data)
            written = int(self._file.write(data))
            digested.result()
        return written

    def close(self) -> None:
        """The file stays open: what comes next is appended to it."""
