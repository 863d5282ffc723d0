"""Functions over a group compare their calls: ranks that call otherwise, refuse or raise are told, and nobody waits."""

import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draw import Call, layout_of
from harness import run_ranks
from recorder import Recorder
from test_sharded import POOL_SIZE, drop_in, pack, share

from mcore_dsa import sharded, sparse_attention_sharded
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.collectives import exchange_rows, gather_rows, reduce_rows
from mcore_dsa.rows import RowPartition
from mcore_dsa.selection_gather import gather_selection

ROWS = 96
ONES = torch.ones(4, 3)


def other_layout(call: Call) -> Call:
    """Documents of other lengths, in as many pools."""
    return replace(call, layout=layout_of([[(0, 48), (48, ROWS)]], num_tokens=ROWS, pool_size=POOL_SIZE))


def one_bit(x: torch.Tensor) -> torch.Tensor:
    """`x` with another last bit somewhere."""
    other = x.clone()
    other.view(torch.int32).view(-1)[17] ^= 1
    return other


def select(change: Callable[[Call], Call] = lambda call: call, **options: Any) -> Callable[[int, Any], Any]:
    """The sharded selection, which rank 1 calls with something else."""

    def call(rank: int, group: Any) -> Any:
        own = pack(ROWS, "near", batch=1)
        return share(change(own), group, **options) if rank == 1 else share(own, group)

    return call


def either(right: Callable[[Any], Any], wrong: Callable[[Any], Any]) -> Callable[[int, Any], Any]:
    return lambda rank, group: (wrong if rank == 1 else right)(group)


def cut(kind: str, ranks: int) -> RowPartition:
    return getattr(RowPartition, kind)(ROWS, ranks)


def shards(kind: str) -> Callable[[Any], Any]:
    """An exchange of rows to their owners under a partition."""
    return lambda group: exchange_rows(
        [torch.zeros(ROWS // dist.get_world_size(), 2)], cut(kind, dist.get_world_size()), group
    )


def chosen(batch: int, budget: int) -> Callable[[Any], Any]:
    """A gather of contiguous shards, of as many bytes for equal products."""

    def gather(group: Any) -> Any:
        partition = cut("contiguous", dist.get_world_size())
        return gather_selection(torch.zeros(batch, partition.rows_of(0), budget, dtype=torch.int32), partition, group)

    return gather


def attended(scale: float, latents: float = 1.0) -> Callable[[Any], Any]:
    """Attention by rows."""

    def call(group: Any) -> Any:
        own, rows = pack(ROWS, "near", batch=1), cut("contiguous", dist.get_world_size()).slices(dist.get_rank())[0]
        arguments = own.select()[:, rows.start : rows.stop], own.layout, own.position_S
        options = {"softmax_scale": scale, "always_select_tail": True, "query_shard_group": group}
        return sparse_attention_sharded(
            torch.ones(ROWS, 1, 2, 4), torch.full((ROWS, 1, 4), latents), *arguments, **options
        )

    return call


# What rank 1 calls otherwise, and what every rank is told of it.
DIFFERENT: dict[str, tuple[Callable[[int, Any], Any], str]] = {
    "layout": (select(other_layout), "layout is '1 samples of 96 tokens in pools of 2, the first 0, segments "),
    "positions": (
        select(lambda call: replace(call, position_S=call.position_S.flip(0))),
        "position_S is '96 tokens, ",
    ),
    "partition": (
        lambda rank, group: share(pack(ROWS, "near", batch=1), group, partition=_of(rank, group)),
        "partition is '96 rows over ",
    ),
    "budget": (select(lambda call: replace(call, budget=2)), "budget is '5' on ranks [0"),
    "dtype of the queries": (select(lambda call: replace(call, q_SBHD=call.q_SBHD.double())), "q_OBHD is 'torch."),
    "scores without relu": (select(use_relu=False), "use_relu is 'True' on ranks [0"),
    "rows of a tensor": (
        either(lambda g: gather_rows(ONES, g), lambda g: gather_rows(ONES[:2], g)),
        "x is 'torch.float32 [4, 3]' on ranks [0",
    ),
    "dtype of a tensor": (
        either(lambda g: gather_rows(ONES, g), lambda g: gather_rows(ONES.int(), g)),
        "'torch.int32 [4, 3]' on ranks [1]",
    ),
    "rows to sum": (
        either(lambda g: reduce_rows(ONES, g), lambda g: reduce_rows(torch.ones(8, 3), g)),
        "'torch.float32 [8, 3]' on ranks [1]",
    ),
    "owners of rows": (either(shards("zigzag"), shards("replicated")), "partition is '96 rows over "),
    "batch and budget of equal bytes": (either(chosen(2, 5), chosen(5, 2)), "batch is '2' on ranks [0"),
    "the tail": (
        either(
            functools.partial(drop_in, pack(ROWS, "near")),
            functools.partial(drop_in, pack(ROWS, "near"), always_select_tail=False),
        ),
        "always_select_tail is 'True' on ranks [0",
    ),
    "the scale of attention": (either(attended(0.5), attended(0.25)), "softmax_scale is '0.5' on ranks [0"),
    "values of pool keys": (
        select(lambda call: replace(call, pool_key_PBD=one_bit(call.pool_key_PBD))),
        "values of pool_key_PBD is '",
    ),
    "ape": (
        either(functools.partial(drop_in, pack(ROWS, "near")), functools.partial(drop_in, pack(ROWS, "near"), ape=0.5)),
        "values of pool_key_PBD is '",
    ),
    "values of latents": (either(attended(0.5), attended(0.5, latents=2.0)), "values of kv_TBC is '"),
    "the function": (
        either(lambda g: gather_rows(ONES, g), lambda g: reduce_rows(ONES, g)),
        "call is 'gather_rows' on ranks [0",
    ),
}


def _of(rank: int, group: Any) -> RowPartition:
    return cut("zigzag" if rank == 1 else "contiguous", dist.get_world_size(group))


def refused(call: Callable[[], Any]) -> str:
    """Of what kind the error is, and what it says."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def every_difference() -> tuple[list[str], bool]:
    """What this rank is told in each call; and a call that is alike on all ranks works after all of them."""
    rank, group = dist.get_rank(), dist.group.WORLD
    told = [refused(functools.partial(call, rank, group)) for call, _ in DIFFERENT.values()]
    right = pack(ROWS, "near")
    return told, torch.equal(share(right, group), right.select())


@pytest.mark.parametrize("ranks", [2, 4])
def test_calls_that_differ_are_told_on_every_rank(ranks: int) -> None:
    of_ranks = run_ranks(every_difference, ranks)
    told, works = of_ranks[0]
    for others, _ in of_ranks:
        assert others == told
    for message, (_, said) in zip(told, DIFFERENT.values(), strict=True):
        assert message.startswith("ValueError: ")
        assert said in message
        assert re.search(r"on ranks \[0(, 2, 3)?\], '.*' on ranks \[1\]; accepted is the same on every rank", message)
    assert works


def a_rank_that_refuses() -> list[str]:
    """Rank 1 alone is called with what it cannot do; `None` stands in for what is no tensor at all."""
    rank, group, own = dist.get_rank(), dist.group.WORLD, pack(ROWS, "near")
    wrong = {"budget": 2.5} if rank == 1 else {}
    calls = [
        lambda: share(replace(own, **wrong), group),
        lambda: share(own, group, partition="zigzag" if rank == 1 else None),
        lambda: drop_in(own, group, **({"mask": ONES} if rank == 1 else {})),
        lambda: gather_rows(ONES.sum() if rank == 1 else ONES, group),
        lambda: exchange_rows(
            [ONES[: 3 if rank == 1 else 4]], RowPartition.zigzag(4 * dist.get_world_size(), 2), group
        ),
    ]
    return [refused(call) for call in calls]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_refuses_its_arguments_tells_the_others(ranks: int) -> None:
    of_ranks = run_ranks(a_rank_that_refuses, ranks)
    own = of_ranks[1]
    assert own[0].startswith("ValueError: budget is 2.5; accepted is an integer >= 1")
    assert own[1].startswith("TypeError: partition is str; accepted")
    assert own[2].startswith("ValueError: mask has shape (4, 3); accepted")
    assert own[3].startswith("ValueError: x has no dimensions; accepted")
    for rank, told in enumerate(of_ranks):
        for mine, its in zip(told[:4], own[:4], strict=True):
            said = its.partition(": ")[2]
            assert mine == its if rank == 1 else re.match(rf"ValueError: .*rank 1: \w+: {re.escape(said)}", mine)
        assert re.search(r"tensors\[0\] has shape \([34], 3\)", told[4])


def raises_in_the_middle(piece_rows: int, at: int) -> tuple[list[str], bool]:
    """Rank 1 raises in its piece `at`, twice; then nobody does."""
    sharded.OVERLAP_ROWS, own = piece_rows, pack(ROWS, "near")
    original, pieces = TorchBackend.select, 0

    def failing(*args: Any, **options: Any) -> Any:
        nonlocal pieces
        pieces += 1
        if pieces == at:
            raise torch.OutOfMemoryError("no memory left")
        return original(*args, **options)

    told = []
    for _ in range(2):
        pieces = 0
        if dist.get_rank() == 1:
            TorchBackend.select = staticmethod(failing)
        told.append(refused(lambda: share(own, dist.group.WORLD)))
        TorchBackend.select = staticmethod(original)
    return told, torch.equal(share(own, dist.group.WORLD), own.select())


@pytest.mark.parametrize(("ranks", "piece_rows", "at"), [(2, 5, 1), (2, 5, 6), (4, 5, 2), (3, 96, 1)])
def test_a_rank_that_raises_while_it_selects_leaves_nobody_waiting(ranks: int, piece_rows: int, at: int) -> None:
    """In its first piece, its last, one of many and the only one; the next call begins in step."""
    for rank, (told, works) in enumerate(run_ranks(raises_in_the_middle, ranks, piece_rows, at)):
        its = "OutOfMemoryError: no memory left"
        others = (
            "ValueError: ranks [1] of the query-shard group raised in the middle of a call; accepted is a call that"
        )
        assert all(said == its if rank == 1 else said.startswith(others) for said in told)
        assert works


def exchanges() -> list[list[str]]:
    """Collectives of one call that compares, of one that need not, and of a group of one."""
    own = pack(ROWS, "near")
    made = []
    for group, agreed in ((dist.group.WORLD, False), (dist.group.WORLD, True), (None, False)):
        with Recorder() as log:
            share(own, group, agreed=agreed)
            drop_in(own, group, agreed=agreed)
            gather_rows(ONES, group, agreed=agreed)
        made.append([call.name for call in log.calls])
    return made


def test_a_caller_who_has_agreed_exchanges_no_header() -> None:
    gather, header = "all_gather_single", "all_gather_object"
    compared = [header, gather, header, header, gather, header, gather]
    assert run_ranks(exchanges, 2) == [[compared, [gather] * 3, []]] * 2
