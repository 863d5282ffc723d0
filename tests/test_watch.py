"""The drift watch: digests that miss nothing, and ranks that come apart told within as many forwards as are set."""

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from hypothesis import given
from hypothesis import strategies as st
from models import OFF, attentions, config, gpt, tokens
from recorder import Recorder

from mcore_dsa import watch
from mcore_dsa.megatron import KPoolDSAttention
from mcore_dsa.settings import ATTEND_SHARD_VARIABLE, DRIFT_VARIABLE, PARTITION_VARIABLE
from mcore_dsa.source import Scored
from mcore_dsa.watch import BLOCKS, Watch, _factors, block_digests, row_digests

EVERY = 3
DTYPES = (torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8)


def by_hand(words: list[int], factors: list[int]) -> int:
    total = sum(word * factor for word, factor in zip(words, factors, strict=True)) % 2**64
    return total - 2**64 * (total >= 2**63)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
def test_a_digest_is_the_sum_in_integers_of_any_size(words: list[int]) -> None:
    """No overflow, no order of summing and no width of a vector unit reaches it."""
    factors = _factors(len(words), torch.device("cpu")).tolist()
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == len(factors)
    assert row_digests(torch.tensor([words])).tolist() == [by_hand(words, factors)]


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.tuples(st.integers(1, 150), st.integers(1, 3), st.integers(1, 9)),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_one_bit_moves_the_digest_of_its_row_and_of_its_block_alone(
    dtype: torch.dtype, shape: tuple[int, ...], seed: int, data: Any
) -> None:
    x = torch.randint(0, 256, (*shape[:2], shape[2] * dtype.itemsize), generator=torch.Generator().manual_seed(seed))
    x = x.to(torch.uint8).view(dtype)
    bits = x.clone().view(torch.uint8)
    row, byte = data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, bits[0].numel() - 1))
    bits[row].flatten()[byte] ^= 1 << data.draw(st.integers(0, 7))
    other = bits.view(dtype)
    assert torch.equal(row_digests(x), row_digests(x.clone()))
    assert (row_digests(x) != row_digests(other)).nonzero().flatten().tolist() == [row]
    blocks = [block_digests(row_digests(each)) for each in (x, other)]
    assert (blocks[0] != blocks[1]).nonzero().flatten().tolist() == [row // -(-shape[0] // BLOCKS)]


def test_rows_of_another_order_and_none_at_all() -> None:
    x = torch.arange(12.0).view(6, 2)
    assert not torch.equal(block_digests(row_digests(x[:1])), block_digests(row_digests(x[1:2])))
    swapped = block_digests(row_digests(x[[1, 0]].repeat(64, 1)))
    assert not torch.equal(swapped, block_digests(row_digests(x[[0, 1]].repeat(64, 1))))
    assert block_digests(row_digests(x[:0])).tolist() == [0] * BLOCKS
    # More words than are multiplied at a time.
    long = torch.randint(0, 2**31, (3, 1 << 23), dtype=torch.int32)
    assert torch.equal(row_digests(long), torch.cat([row_digests(row) for row in long.split(1)]))


def test_a_forward_is_compared_when_its_turn_comes_or_it_is_asked_for() -> None:
    def compared(every: int, asked: set[int]) -> list[int]:
        watch, found = Watch(every, None, None), []
        for forward in range(1, 9):
            if forward in asked:
                watch.compare_next()
            if watch.begin(1, []) is not None:
                found.append(forward)
        return found

    assert compared(4, {2, 8}) == [2, 4, 8]
    assert compared(0, {2}) == []


def poke(layer: KPoolDSAttention, name: str, value: float) -> None:
    """A write that no version counter sees, as of an optimizer of someone's own."""
    layer.indexer.get_parameter(name).data.flatten()[5].add_(value)


def corrupt_keys(layer: KPoolDSAttention) -> None:
    """The gathered keys overwritten behind the collective, on this rank alone."""
    original = Scored.gathered

    def gathered(self: Scored, keys: torch.Tensor, plan: Any) -> torch.Tensor:
        whole = original(self, keys, plan)
        whole[37, 1, 3] += 1
        return whole

    Scored.gathered = gathered


def corrupt_selection(layer: KPoolDSAttention) -> None:
    original = Watch.begin

    def begin(self: Watch, *args: Any) -> Any:
        digests = original(self, *args)
        if digests is not None:
            add = digests._add_selection

            def add_selection(selection: torch.Tensor) -> None:
                selection = selection.clone()
                selection[1, selection.shape[1] - 8, 2] -= 1
                add(selection)

            digests._add_selection = add_selection
        return digests

    Watch.begin = begin


def cannot_digest(layer: KPoolDSAttention) -> None:
    """No memory for the digest of what is gathered, on this rank alone."""
    original = Scored.gathered

    def gathered(self: Scored, keys: torch.Tensor, plan: Any) -> torch.Tensor:
        whole = original(self, keys, plan)
        watch.row_digests = lambda *_: (_ for _ in ()).throw(MemoryError("no memory left"))
        return whole

    Scored.gathered = gathered


FAULTS: dict[str, tuple[Any, str]] = {
    "a weight": (
        lambda layer: poke(layer, "linear_wq_b.weight", 1e-3),
        r"weight linear_wq_b.weight is '[0-9a-f]{16}' on ranks \[0.*\], '[0-9a-f]{16}' on ranks "
        r"\[1\]; accepted is the same on every rank$",
    ),
    "another ape": (
        lambda layer: poke(layer, "index_kpool_compress_ape", 1.0),
        r"weight index_kpool_compress_ape is .* on ranks \[1\]; accepted is the same on every "
        r"rank; pool keys in pools 0 ... 0 is .* on ranks \[1\]",
    ),
    "keys that were gathered": (
        corrupt_keys,
        r"^keys in tokens 36 ... 37 is .* on ranks \[1\].*; pool keys in "
        r"pools 9 ... 9 is .* on ranks \[1\]",
    ),
    "selections that were gathered": (
        corrupt_selection,
        r"^selection in rows 88 ... 89 is '[0-9a-f]{16}' on ranks \[0.*\], .* on ranks \[1\]",
    ),
    "no memory for a digest": (
        cannot_digest,
        r"^digests are missing on ranks \[1\]; accepted are those of every rank$",
    ),
    "NaN in a weight": (
        lambda layer: poke(layer, "linear_weights_proj.weight", float("nan")),
        r"^weight linear_weights_proj.weight holds NaN or infinity on ranks \[1\]; accepted are "
        r"finite values",
    ),
}


def come_apart(what: str) -> tuple[str, int, bool]:
    """Rank 1 comes apart after a comparison that found nothing: what is told, when, and whether others were silent."""
    layer_of = gpt(config(num_layers=1))
    (layer,), ids = attentions(layer_of), tokens()[:, :-1]
    with torch.no_grad():
        for _ in range(EVERY):
            layer_of(ids, None, None)
        before = Scored.gathered, Watch.begin
        if dist.get_rank() == 1:
            FAULTS[what][0](layer)
        try:
            for _ in range(EVERY - 1):
                layer_of(ids, None, None)
            with pytest.raises(ValueError, match="accepted") as raised:
                layer_of(ids, None, None)
        finally:
            Scored.gathered, Watch.begin = before
            watch.row_digests = row_digests
    return str(raised.value), layer.watch.forwards, layer.watch.comparisons == 2


def all_faults() -> list[tuple[str, int, bool]]:
    """One after the other, each with a model of its own and rows and attention cut another way."""
    told = []
    flags = (("1", "heads"), ("0", "heads"), ("zigzag", "rows"), ("balanced", "heads"), ("1", "rows"), ("1", "heads"))
    for what, (flag, cut) in zip(FAULTS, flags, strict=True):
        os.environ |= {PARTITION_VARIABLE: flag, ATTEND_SHARD_VARIABLE: cut}
        told.append(come_apart(what))
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_come_apart_are_told_within_as_many_forwards(ranks: int) -> None:
    of_ranks = megatron_ranks(all_faults, ranks, tp=ranks, env={**OFF, DRIFT_VARIABLE: str(EVERY)})
    assert all(told == of_ranks[0] for told in of_ranks)
    for (_, said), (message, forward, compared) in zip(FAULTS.values(), of_ranks[0], strict=True):
        where, _, what = message.partition(": ")
        assert where == "drift in layer 1, forward 6 (ranks within the query-shard group, group after group)"
        assert re.search(said, what), message
        assert (forward, compared) == (2 * EVERY, True)


def over_context() -> list[str]:
    """Keys are one over all ranks; of selections the ranks of one context have their own."""
    model = gpt(config(num_layers=1, context_parallel_size=2, cp_comm_type="allgather"))
    told = []
    for what in ("keys that were gathered", "selections that were gathered"):
        before = Scored.gathered, Watch.begin
        with torch.no_grad():
            model(tokens()[:, :48], None, None)
            if dist.get_rank() == 3:
                FAULTS[what][0](attentions(model)[0])
            with pytest.raises(ValueError, match="accepted") as raised:
                model(tokens()[:, :48], None, None)
        Scored.gathered, Watch.begin = before
        told.append(str(raised.value))
    return told


def test_keys_are_compared_over_context_parallel_ranks_and_selections_within_their_own() -> None:
    of_ranks = megatron_ranks(over_context, 4, tp=2, cp=2, env={**OFF, DRIFT_VARIABLE: "2"})
    assert all(told == of_ranks[0] for told in of_ranks)
    keys, selections = of_ranks[0]
    assert re.search(r": keys in tokens 36 ... 37 is '\w+' on ranks \[0, 1, 2\], .* \[3\]", keys)
    # Ranks 0 and 1 have the other half of the rows.
    assert re.search(r": selection in rows 40 ... 40 is '\w+' on ranks \[2\], .* \[3\]", selections)


def collectives_of(every: str) -> list[tuple[str, tuple[int, ...]]]:
    os.environ[DRIFT_VARIABLE] = every
    model = gpt(config(num_layers=1))
    with torch.no_grad():
        model(tokens()[:, :-1], None, None)
        with Recorder() as log:
            model(tokens()[:, :-1], None, None)
    return [(call.name, call.input[1]) for call in log.calls if call.input is not None and call.input[0] == torch.int64]


def test_a_comparison_is_one_small_collective() -> None:
    """Two words a weight, 64 blocks of keys, pool keys and selections each, and one; none in other forwards."""
    for told in megatron_ranks(compared_and_not, 2, tp=2, env=OFF):
        assert told == [[], [("all_gather_single", (1, 2 * 7 + 3 * BLOCKS + 1))]]


def compared_and_not() -> list[Any]:
    return [collectives_of("0"), collectives_of("2")]
