"""The selections of one micro-batch as data: what they hold, whether they can be true, how they are kept in a file.

Letters of shapes: `mcore_dsa/__init__.py`; `x` are the DSA layers of the whole model, in their order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mcore_dsa.agreement import weights_digest
from mcore_dsa.checks import check_positive, kind_of
from mcore_dsa.hf_config import parse_json, shown
from mcore_dsa.kpool import PoolLayout
from mcore_dsa.tensor_files import save_tensors

FORMAT, VERSION = "mcore_dsa.selections", "1"
# Bytes that a pass over a record takes beyond the record.
CHUNK_BYTES = 64 * 2**20

_SELECTION, _RECORDED = "selection", "recorded"
_STORED = {_SELECTION: "I32", _RECORDED: "BOOL"}


class LayerAgreement(NamedTuple):
    """How two selections of a layer compare, over the rows that both have.

    Attributes:
        layer: place of the layer among the DSA layers.
        rows, rows_differing: rows compared, and those whose pools are not the same.
        pools, pools_equal: pools that the recorded rows select, and those of them that the others select too.
    """

    layer: int
    rows: int
    rows_differing: int
    pools: int
    pools_equal: int

    @property
    def share(self) -> float:
        """Of the recorded pools, those that are selected in both; 1 where there are none."""
        return self.pools_equal / self.pools if self.pools else 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionRecord:
    """What every row of a micro-batch selected in every DSA layer, free of how the rows were packed and sharded.

    Documents stand one behind the other, each in its padded place. A dense batch is its samples, one behind the other,
    each a document. Nothing may be written to a record: what is found out about it is found once.

    Attributes:
        selection_xTK: int32 `[layers, tokens, budget]`, pool ids of the row's document, whose first pool is 0,
            ascending, -1 in unused slots; -1 throughout behind a document's own length and where there is no record.
        recorded_T: bool, False at rows without a record, of which nothing is known (not: that they select nothing).
        lengths, padded_lengths: tokens of each document, and of its place.
        pool_size: `index_kpool`.

    Raises: TypeError, ValueError for tensors of another dtype or shape and for lengths that do not fit; what the
    selections hold is for `check`.
    """

    selection_xTK: Tensor
    recorded_T: Tensor
    lengths: tuple[int, ...]
    padded_lengths: tuple[int, ...]
    pool_size: int

    def __post_init__(self) -> None:
        check_positive("pool_size", self.pool_size)
        for name, dtype, ndim in (("selection_xTK", torch.int32, 3), ("recorded_T", torch.bool, 1)):
            tensor = getattr(self, name)
            if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
                raise TypeError(f"{name} is {kind_of(tensor)}; accepted is {dtype}")
            if tensor.ndim != ndim or tensor.device.type != "cpu":
                raise ValueError(
                    f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; accepted are {ndim} dimensions on cpu"
                )
        for name in ("lengths", "padded_lengths"):
            counts = getattr(self, name)
            if not isinstance(counts, tuple) or not all(_is_integer(count) for count in counts):
                raise TypeError(f"{name} is {shown(counts)}; accepted is a tuple of integers")
        fits = len(self.lengths) == len(self.padded_lengths)
        fits = fits and all(0 <= own <= place for own, place in zip(self.lengths, self.padded_lengths, strict=True))
        if not fits:
            raise ValueError(
                f"lengths is {shortened(self.lengths)} and padded_lengths {shortened(self.padded_lengths)}; accepted "
                "are as many of both, 0 <= length <= padded length"
            )
        layers, tokens, budget = self.selection_xTK.shape
        if tokens != sum(self.padded_lengths) or self.recorded_T.shape[0] != tokens or min(layers, budget) < 1:
            raise ValueError(
                f"selection_xTK has shape {[layers, tokens, budget]} and recorded_T {list(self.recorded_T.shape)}; "
                f"accepted are [layers >= 1, {sum(self.padded_lengths)}, budget >= 1] and [{sum(self.padded_lengths)}]"
            )

    @property
    def layers(self) -> int:
        return self.selection_xTK.shape[0]

    @property
    def budget(self) -> int:
        return self.selection_xTK.shape[2]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first row of each document."""
        return tuple(accumulate(self.padded_lengths, initial=0))[:-1]

    @cached_property
    def document_T(self) -> Tensor:
        """int64, the document in whose place each row stands."""
        return torch.arange(len(self.lengths), device="cpu").repeat_interleave(
            torch.tensor(self.padded_lengths, dtype=torch.long, device="cpu")
        )

    @cached_property
    def visible_T(self) -> Tensor:
        """int64, complete pools of its document that each row sees; 0 behind the document's own length."""
        start_T = torch.tensor(self.starts, dtype=torch.long, device="cpu")[self.document_T]
        length_T = torch.tensor(self.lengths, dtype=torch.long, device="cpu")[self.document_T]
        offset_T = torch.arange(len(start_T), device="cpu") - start_T
        return (offset_T + 1) // self.pool_size * (offset_T < length_T)

    @cached_property
    def missing_T(self) -> Tensor:
        """bool, rows that see a pool and have no record."""
        return ~self.recorded_T & (self.visible_T > 0)

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks if and only if their records are; a second for each GiB."""
        sizes = f"{self.lengths} {self.padded_lengths} {self.pool_size}"
        return weights_digest([(sizes, self.selection_xTK), (_RECORDED, self.recorded_T)])

    @cached_property
    def fault(self) -> str:
        """The first thing that cannot be true, with its layer, row and id; empty in a sound record."""
        for layer, part in self._chunks(16):
            chosen_IK, visible_I1 = self.selection_xTK[layer, part], self.visible_T[part].unsqueeze(-1)
            bad_IK = (chosen_IK < -1) | (chosen_IK >= visible_I1)
            before_IK, after_IK = chosen_IK[:, :-1], chosen_IK[:, 1:]
            bad_IK[:, 1:] |= (after_IK >= 0) & ((before_IK < 0) | (after_IK <= before_IK))
            some_I = chosen_IK[:, 0] >= 0
            bad_I = bad_IK.any(-1) | (some_I != (visible_I1.squeeze(-1) > 0) & self.recorded_T[part])
            if bool(bad_I.any()):
                return self._explain(layer, part.start + int(bad_I.nonzero()[0]))
        return ""

    def check(self) -> None:
        """Refuse a record that no forward can have made: once, whatever it is asked.

        Raises: ValueError naming layer, row and id of an id out of range, of another document, of a pool that is not
        complete at its row, twice or out of order, of an unused slot before a used one, of a recorded row that sees
        pools and selects none, and of a selection where there is no record.
        """
        if self.fault:
            raise ValueError(self.fault)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the record to a new safetensors file.

        Raises: FileExistsError for a file that is there, OSError for one that cannot be written.
        """
        path = Path(path)
        if os.path.lexists(path):
            raise FileExistsError(f"path is {path}, which is there; accepted is a new file")
        said = {"pool_size": self.pool_size, "lengths": self.lengths, "padded_lengths": self.padded_lengths}
        metadata = {"format": FORMAT, "version": VERSION} | {name: json.dumps(value) for name, value in said.items()}
        save_tensors({_SELECTION: self.selection_xTK, _RECORDED: self.recorded_T}, path, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> SelectionRecord:
        """Read and check a record; its tensors are views of the file, which ranks of a host share.

        Raises: OSError for a file that is not there, ValueError for one that holds no sound record.
        """
        from safetensors import SafetensorError, safe_open

        path = Path(path)
        path.stat()
        try:
            with safe_open(path, framework="pt") as file:
                metadata, names = file.metadata() or {}, sorted(file.keys())
                kind = {key: metadata.get(key) for key in ("format", "version")}
                if kind != {"format": FORMAT, "version": VERSION}:
                    raise ValueError(f"{path} is {kind}; accepted is format {FORMAT!r} and version {VERSION!r}")
                stored = {name: file.get_slice(name).get_dtype() for name in names}
                if stored != _STORED:
                    raise ValueError(f"{path} holds {stored}; accepted is {_STORED}")
                tensors = {name: file.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise ValueError(f"{path} cannot be read: {error}; accepted is a safetensors file") from error
        record = cls(
            selection_xTK=tensors[_SELECTION],
            recorded_T=tensors[_RECORDED],
            lengths=tuple(_integers(metadata, "lengths")),
            padded_lengths=tuple(_integers(metadata, "padded_lengths")),
            pool_size=_one_integer(metadata, "pool_size"),
        )
        record.check()
        return record

    def agreement(self, own: SelectionRecord) -> tuple[LayerAgreement, ...]:
        """Compare a record, say of a rollout, with what the model here selects for the same documents, layer by layer.

        Raises: TypeError for what is no record, ValueError for records of other documents, layers, pools or budgets.
        """
        if not isinstance(own, SelectionRecord):
            raise TypeError(f"own is {kind_of(own)}; accepted is a SelectionRecord")
        for name in ("layers", "budget", "pool_size", "lengths", "padded_lengths"):
            mine, theirs = getattr(self, name), getattr(own, name)
            if mine != theirs:
                said = [value if isinstance(value, int) else shortened(value) for value in (theirs, mine)]
                raise ValueError(f"own.{name} is {said[0]}; accepted is that of the record, {said[1]}")
        both_T = self.recorded_T & own.recorded_T & (self.visible_T > 0)
        found = torch.zeros(self.layers, 4, dtype=torch.long, device="cpu")
        for layer, part in self._chunks(48):
            rows_I = both_T[part]
            mine_IK, theirs_IK = self.selection_xTK[layer, part][rows_I], own.selection_xTK[layer, part][rows_I]
            # A row holds a pool once: twice in both together is once in each.
            sorted_IK = torch.cat([mine_IK, theirs_IK], -1).sort(-1).values
            equal_I = ((sorted_IK[:, 1:] == sorted_IK[:, :-1]) & (sorted_IK[:, 1:] >= 0)).sum(-1)
            count_I = (mine_IK >= 0).sum(-1)
            differ_I = (equal_I < count_I) | (equal_I < (theirs_IK >= 0).sum(-1))
            found[layer] += torch.stack([rows_I.sum(), differ_I.sum(), count_I.sum(), equal_I.sum()])
        return tuple(LayerAgreement(layer, *counts) for layer, counts in enumerate(found.tolist()))

    def _chunks(self, id_bytes: int) -> Iterator[tuple[int, slice]]:
        """Layer and rows, so many rows at a time that a pass which takes `id_bytes` for an id stays in bounds."""
        step = max(1, CHUNK_BYTES // (id_bytes * self.budget))
        for layer in range(self.layers):
            for start in range(0, self.selection_xTK.shape[1], step):
                yield layer, slice(start, start + step)

    def _explain(self, layer: int, row: int) -> str:
        chosen, visible = self.selection_xTK[layer, row].tolist(), int(self.visible_T[row])
        document = int(self.document_T[row])
        pools = self.lengths[document] // self.pool_size
        place = f"of layer {layer} at row {row}, token {row - self.starts[document]} of document {document},"
        accepted = f"-1 and 0 <= id < {visible}, ascending"
        for slot, pool in enumerate(chosen):
            before = chosen[:slot]
            if pool < -1 or pool >= max(self.lengths) // self.pool_size:
                why = "it is out of range"
            elif pool >= pools:
                why = f"it is in another document, this one has {pools} pools"
            elif pool >= visible:
                why = "it is in the future, not complete at this row"
            elif pool >= 0 and pool in before:
                why = "it is there twice"
            elif pool >= 0 and -1 in before:
                why = "it stands behind an unused slot"
            elif pool >= 0 and before and pool < before[-1]:
                why = "it is out of order"
            else:
                continue
            return f"the pool id {place} is {pool}; accepted are {accepted}: {why}"
        if self.recorded_T[row]:
            return f"the first pool id {place} is -1; accepted is a pool of the {visible} that a recorded row sees"
        return f"the first pool id {place} is {chosen[0]}; accepted is -1 in a row without a record"


def documents_of(layout: PoolLayout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and padded lengths of a layout's documents, sample after sample; what stands before a sample's first
    document is the place of an empty one.
    """
    lengths, padded = [], []
    for starts, ends in zip(layout.segment_start_BN.tolist(), layout.segment_end_BN.tolist(), strict=True):
        begins, stops = ([0, *starts], [0, *ends]) if starts[0] else (starts, ends)
        lengths += [stop - begin for begin, stop in zip(begins, stops, strict=True)]
        padded += [after - begin for begin, after in pairwise([*begins, layout.num_tokens])]
    return tuple(lengths), tuple(padded)


def shortened(values: Sequence[int]) -> str:
    """The head of a long list, for a message."""
    return f"[{', '.join(map(str, values[:8]))}{', ...' * (len(values) > 8)}]"


def _integers(metadata: dict[str, str], name: str) -> list[int]:
    """The integers of a field, one or a list of them."""
    try:
        value = parse_json(metadata.get(name, "").encode())
    except ValueError:
        value = None
    listed = value if isinstance(value, list) else [value]
    if not all(_is_integer(number) for number in listed):
        raise ValueError(f"{name} is {shown(metadata.get(name))} in the file's metadata; accepted are integers")
    return listed


def _one_integer(metadata: dict[str, str], name: str) -> int:
    listed = _integers(metadata, name)
    if len(listed) != 1:
        raise ValueError(f"{name} is {shown(listed)} in the file's metadata; accepted is one integer")
    return listed[0]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
