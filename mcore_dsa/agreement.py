"""What every rank of a tensor-parallel group must have in common before it selects, and the exchange that compares it.

A difference raises nothing by itself: the ranks would attend to different tokens and train on.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.settings import Settings

# Settings that each group has agreed on so far, and how many that makes in this process.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[tuple[str, str], ...]]] = weakref.WeakKeyDictionary()
_numbers = itertools.count(1)
_REPLICAS_KEY = "mcore_dsa/settings"


@dataclass(frozen=True, kw_only=True)
class SelectionContract:
    """Everything that reaches a selection or an output and is not an input; equal on all ranks of a group.

    Fields that stand in a model's configuration carry its names.

    Attributes:
        settings: the environment's settings, agreed by value.
        versions: of this package and of the libraries under it.
        params_dtype: of the model's weights and projections.
        softmax_scale: factor of the attention's logits.
        backend: what compresses, selects and attends, with a digest of its bits on this device.
        products: how the process multiplies fp32 matrices, projections among them.
        weights: digest of the frozen weights of this layer's indexer.
        source: `SelectionSource.identity` of where selections come from.
        documents: `SelectionPlan.documents` of the micro-batch at hand.
        rows: its sizes and dtypes, `Batch.described`.
    """

    settings: Settings
    versions: str
    hidden_size: int
    q_lora_rank: int
    kv_lora_rank: int
    num_attention_heads: int
    dsa_indexer_n_heads: int
    dsa_indexer_head_dim: int
    dsa_indexer_topk: int
    dsa_indexer_kpool: int
    dsa_indexer_kpool_always_select_tail: bool
    dsa_indexer_k_norm_epsilon: float
    dsa_indexer_scoring_relu: bool
    params_dtype: torch.dtype
    softmax_scale: float
    backend: str
    products: str
    weights: str
    source: str
    documents: str = ""
    rows: str = ""

    def describe(self) -> dict[str, str]:
        """Every field as text that is equal on two ranks if and only if they agree, settings by their variables."""
        own = {field.name: str(getattr(self, field.name)) for field in fields(self) if field.name != "settings"}
        return {**self.settings.describe(), **own}


def weights_digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Digest of the names, dtypes, shapes and bits of tensors."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in named:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        # A single element counts as contiguous whatever its strides, and is no bytes by them.
        whole = tensor.detach().clone(memory_format=torch.contiguous_format).flatten()
        digest.update(whole.view(torch.uint8).cpu().numpy().data)
    return digest.hexdigest()


def agree(
    values: Mapping[str, str],
    faults: Sequence[str],
    *groups: dist.ProcessGroup,
    about: str = "settings",
) -> None:
    """Make sure that every rank of `groups` runs with the same values, before anything depends on it.

    With several groups these are all that this rank reaches through one after the other; ranks are counted with those
    of the first group side by side.

    Every call is one exchange, which all ranks must enter: nothing that a rank remembers may let it stay out, or a rank
    whose settings have changed would wait for it alone. A rank that could not read a setting, or found that it cannot
    keep the contract, passes what is wrong as `faults`, so that all ranks raise instead of waiting in a later
    collective.

    Args:
        about: what it is of the group that differs or is faulty, as the message begins.

    Raises: ValueError on every rank, naming the values that differ with their ranks, and every fault.
    """
    told: list[Any] = [(dict(values), tuple(faults))]
    for group in groups:
        of_ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, told, group=group)
        told = list(itertools.chain.from_iterable(of_ranks))
    problems = [f"rank {rank}: {fault}" for rank, (_, its_faults) in enumerate(told) for fault in its_faults]
    # A rank that has a fault may have no values to tell.
    comparable = all(its_values for its_values, _ in told)
    for name in sorted({name for its_values, _ in told for name in its_values}) if comparable else ():
        problems += differences(name, [its_values.get(name, "not set") for its_values, _ in told])
    if problems:
        raise ValueError(f"{about} of the query-shard group (ranks within it): " + "; ".join(problems))


def differences(name: str, values: Sequence[str], ranks: Sequence[int] | None = None) -> list[str]:
    """What ranks, 0 ... by default, say of one value, as a sentence; nothing where all say the same."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        ranks_of.setdefault(value, []).append(rank)
    said = ", ".join(f"{value!r} on ranks {ranks}" for value, ranks in ranks_of.items())
    return [f"{name} is {said}; accepted is the same on every rank"] if len(ranks_of) > 1 else []


@contextmanager
def told_to_all(about: str, *groups: dist.ProcessGroup) -> Iterator[list[str]]:
    """Around what a rank does by itself: what it raises, or adds to the list, is a fault that every rank raises.

    All ranks have to come. In the block, nothing that can fail may stand before a collective.

    Raises: as `agree`, from what the block raised.
    """
    faults: list[str] = []
    raised = None
    try:
        yield faults
    except Exception as error:
        raised = error
        faults.append(f"{type(error).__name__}: {error}")
    try:
        agree({}, faults, *groups, about=about)
    except ValueError as told:
        raise told from raised


@contextmanager
def header(call: str, group: dist.ProcessGroup | None, *, agreed: bool) -> Iterator[dict[str, object]]:
    """Compare a call over the ranks of its group before its first collective.

    The block checks the arguments and writes into what it is given whatever the ranks must have in common. Where it
    raises on one rank, the others hear of it here and wait in no later collective.

    Args:
        group: one that this rank is in.
        agreed: whether the caller answers for all of it; then nothing is exchanged.

    Raises: ValueError on every rank, naming what differs with the ranks, and what was refused on others; what the block
        raises where it raises.
    """
    values: dict[str, object] = {}
    others = [] if agreed or group is None or dist.get_world_size(group) == 1 else [group]
    try:
        yield values
    except Exception as error:
        if others:
            with suppress(ValueError):
                agree({}, [f"{call}: {error}"], *others, about="calls")
        raise
    if others:
        agree({"call": call, **{name: str(value) for name, value in values.items()}}, (), *others, about="calls")


def newly_agreed(settings: Mapping[str, str], group: dist.ProcessGroup) -> int:
    """The number of these settings among all that this process agreed on, if `group` has not before; else 0."""
    mine, agreed = tuple(sorted(settings.items())), _agreed.setdefault(group, set())
    if mine in agreed:
        return 0
    agreed.add(mine)
    return next(_numbers)


def differing_replica(settings: Mapping[str, str], number: int) -> str | None:
    """How these settings differ from those of the group, anywhere in the world, that told its own first.

    Data-parallel replicas and pipeline stages do not select for one another, so nobody waits here: one exchange with
    the store behind the default process group.

    Args:
        settings: as `Settings.describe` says them.
        number: of `newly_agreed`: a run may change its settings between two models.

    Returns: None where they are the same, or first.

    Raises: what the store raises where it is lost.
    """
    mine = "\n".join(f"{name}={value!r}" for name, value in sorted(settings.items()))
    store = dist.distributed_c10d._get_default_store()
    first: str = store.compare_set(f"{_REPLICAS_KEY}/{number}", "", f"rank {dist.get_rank()}\n{mine}").decode()
    whose, _, theirs = first.partition("\n")
    # By name: another version of the package has other settings.
    here, there = (dict(line.partition("=")[::2] for line in text.splitlines()) for text in (mine, theirs))
    differ = [
        f"{name} is {here.get(name, 'not set')} here and {there.get(name, 'not set')} on {whose}"
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]
    return "; ".join(differ) or None
