"""Drift: whether the ranks of a group still hold the same frozen weights, keys, pools and selections.

Letters of shapes: `mcore_dsa/__init__.py`.

What ranks agree on at their first forward may come apart later, by a write that nobody sees, a bit that flips or a
buffer that is overwritten, and raises nothing: the ranks attend to different tokens and train on. So every so many
forwards the ranks of a layer compare digests of what each holds by itself. What one rank makes and the others get, its
queries and its rows of the selection, is equal everywhere even where it is wrong; `verified.py` looks into that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_dsa.agreement import differences
from mcore_dsa.collectives import Group, gather_rows, group_size

# Row blocks of a tensor that are told apart, 512 bytes of digests.
BLOCKS = 64
# Words of 8 bytes that are multiplied at a time: 32 MiB of scratch.
_CHUNK_WORDS = 1 << 22
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class Watch:
    """Compares what the ranks of one layer hold, every `every` forwards; 0 is never.

    All ranks that hold the layer's keys, over tensor and context parallelism, have to run its forwards together.

    Attributes:
        forwards: of the layer so far, those that selected.
        comparisons: how many of them were compared.
    """

    def __init__(self, every: int, group: Group, context_group: Group) -> None:
        self._every, self._group, self._context_group = every, group, context_group
        self.forwards = self.comparisons = 0
        self._asked = False

    def compare_next(self) -> None:
        """Have the next forward compared too, where any is; all ranks have to ask."""
        self._asked = self._every > 0

    def begin(self, layer: int, weights: Iterable[tuple[str, Tensor]]) -> Digests | None:
        """Count one more forward of `layer`; where it is one that is compared, what takes its digests.

        Args:
            weights: the layer's frozen parameters by name.
        """
        self.forwards += 1
        if not self._asked and (not self._every or self.forwards % self._every):
            return None
        self._asked = False
        self.comparisons += 1
        digests = Digests(f"layer {layer}, forward {self.forwards}", self._group, self._context_group)
        for name, weight in weights:
            digests.add_weight(name, weight)
        return digests


class _Entry(NamedTuple):
    name: str
    of: str
    rows: int
    of_context: bool
    words: int


class Digests:
    """Digests of one forward: `add` what must be equal, then `compare` it over the ranks. On the device until then."""

    def __init__(self, where: str, group: Group, context_group: Group) -> None:
        self._where, self._group, self._context_group = where, group, context_group
        self._entries: list[_Entry] = []
        self._words: list[Tensor] = []
        self._raised: Exception | None = None

    def add_weight(self, name: str, weight: Tensor) -> None:
        """A frozen parameter, which must be finite too."""

        def words() -> Tensor:
            return torch.cat([whole_digest(weight.detach()), weight.detach().isfinite().all().long().view(1)])

        self._add(_Entry(f"weight {name}", "", 0, False, 2), words, weight.device)

    def add(self, name: str, x_RX: Tensor, *, of: str) -> None:
        """`[r, ...]`, rows called `of`, which every rank holds."""
        entry = _Entry(name, of, len(x_RX), False, BLOCKS)
        self._add(entry, lambda: block_digests(row_digests(x_RX)), x_RX.device)

    def _add_selection(self, selection_BSK: Tensor) -> None:
        batch, rows, _ = selection_BSK.shape

        def words() -> Tensor:
            of_rows_SB = row_digests(selection_BSK.flatten(0, 1)).view(batch, rows).T
            return block_digests(row_digests(of_rows_SB))

        self._add(_Entry("selection", "rows", rows, True, BLOCKS), words, selection_BSK.device)

    def _add(self, entry: _Entry, words: Callable[[], Tensor], device: torch.device) -> None:
        self._entries.append(entry)
        try:
            self._words.append(words())
        # For want of memory perhaps; the others are on their way to the next collective, and hear of it in `compare`.
        except Exception as error:
            self._raised = error
            self._words.append(torch.zeros(entry.words, dtype=torch.int64, device=device))

    def compare(self, selection_BSK: Tensor | None) -> None:
        """One collective over each group, and the one wait of the host; all ranks have to come.

        Args:
            selection_BSK: of every row, where the ranks of one tensor-parallel group hold it.

        Raises: ValueError on every rank: of each thing that differs the first block of rows, with the digests and the
            ranks that hold them; every weight that is not finite; and the ranks that could not take their digests.
        """
        if selection_BSK is not None:
            self._add_selection(selection_BSK)
        words = torch.cat([*self._words, self._words[0].new_tensor([self._raised is not None])]).unsqueeze(0)
        of_ranks = gather_rows(gather_rows(words, self._group, agreed=True), self._context_group, agreed=True)
        ranks, first, problems = group_size(self._group), 0, []
        table = of_ranks.cpu()
        if without := table[:, -1].nonzero().flatten().tolist():
            problems.append(f"digests are missing on ranks {without}; accepted are those of every rank")
        for entry in self._entries if not without else ():
            columns = table[:, first : first + entry.words]
            first += entry.words
            for start in range(0, len(columns), ranks if entry.of_context else len(columns)):
                together = columns[start : start + ranks] if entry.of_context else columns
                problems += self._of_ranks(entry, together, start)
        if problems:
            where = f"{self._where} (ranks within the query-shard group, group after group)"
            raise ValueError(f"drift in {where}: {'; '.join(problems)}") from self._raised

    def _of_ranks(self, entry: _Entry, words_GX: Tensor, first_rank: int) -> list[str]:
        """How these ranks, of which the first is `first_rank`, differ in one thing."""
        name = entry.name
        if not entry.of:
            wrong = [rank for rank, finite in enumerate(words_GX[:, 1].tolist()) if not finite]
            if wrong:
                return [f"{name} holds NaN or infinity on ranks {wrong}; accepted are finite values"]
        differs = (words_GX != words_GX[:1]).any(0).nonzero().flatten().tolist()
        if not differs:
            return []
        if entry.of:
            block = -(-entry.rows // BLOCKS)
            start = differs[0] * block
            name += f" in {entry.of} {start} ... {min(start + block, entry.rows) - 1}"
        said = [f"{word % 2**64:016x}" for word in words_GX[:, differs[0]].tolist()]
        return differences(name, said, range(first_rank, first_rank + len(said)))


def row_digests(x_RX: Tensor) -> Tensor:
    """int64 `[r]`, a digest of the bits of each row of `[r, ...]`, exact and the same in whatever order it is summed.

    The sum, modulo 2**64, of the row's words times odd numbers without a pattern: rows that differ in one word never
    have one digest, and others by chance once in 2**64.
    """
    words_RX = _words(x_RX)
    factor_X = _factors(words_RX.shape[1], x_RX.device)
    digest_R = torch.empty(len(words_RX), dtype=torch.int64, device=x_RX.device)
    step = max(1, _CHUNK_WORDS // max(1, words_RX.shape[1]))
    for start in range(0, len(words_RX), step):
        part = slice(start, start + step)
        torch.sum(words_RX[part] * factor_X, dim=1, out=digest_R[part])
    return digest_R


def block_digests(digest_R: Tensor) -> Tensor:
    """int64 `[BLOCKS]`, of equal blocks of `ceil(r / BLOCKS)` rows, the last ones shorter or empty."""
    rows = -(-len(digest_R) // BLOCKS)
    return row_digests(F.pad(digest_R, (0, rows * BLOCKS - len(digest_R))).view(BLOCKS, rows))


def whole_digest(x: Tensor) -> Tensor:
    """int64 `[1]`, of all bits of `x`."""
    return row_digests(row_digests(torch.atleast_2d(x)).unsqueeze(0))


def _words(x_RX: Tensor) -> Tensor:
    """A row's bits as the widest integers that it is a whole number of."""
    if not x_RX.numel():
        return x_RX.new_empty((len(x_RX), 0), dtype=torch.int64)
    rows_RX = x_RX.reshape(len(x_RX), -1).contiguous()
    size = rows_RX.shape[1] * rows_RX.element_size()
    width, word = next((width, word) for width, word in _WORDS.items() if size % width == 0)
    # Of a flat buffer's parameters some begin in the middle of a word, where no view of words can.
    if rows_RX.storage_offset() * rows_RX.element_size() % width:
        rows_RX = rows_RX.clone()
    return rows_RX.view(word)


def _factors(count: int, device: torch.device) -> Tensor:
    """int64 `[count]`, odd; the mixing of splitmix64."""
    x = torch.arange(count, device=device) * -0x61C8864680B583EB
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        x = (x ^ (x >> 30)) * factor
    return x | 1
