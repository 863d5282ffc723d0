"""`IndexerState` against the training path, bit for bit, and against transformers' own cached decode."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from draw import EXACT, ROUNDED, numbers, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from test_parity_indexer import HIDDEN, Q_LORA, build_indexer
from torch import Tensor
from transformers.cache_utils import Cache, DynamicIndexedLayer

from mcore_dsa.functions import compress_keys, select_pools
from mcore_dsa.kpool import PoolLayout, expand_selection
from mcore_dsa.state import IndexerState


@dataclass(frozen=True)
class Batch:
    """Sequences of one length without padding, and what training selects for each of their rows."""

    q_SBHD: Tensor
    weights_SBH: Tensor
    key_SBD: Tensor
    gate_SBD: Tensor
    ape_JD: Tensor
    budget: int
    use_relu: bool

    @property
    def tokens(self) -> int:
        return self.key_SBD.shape[0]

    def trained(self, layout: PoolLayout) -> Tensor:
        pool_key_PBD = compress_keys(self.key_SBD, self.gate_SBD, self.ape_JD, layout)
        options = {"budget": self.budget, "use_relu": self.use_relu}
        return select_pools(self.q_SBHD, self.weights_SBH, pool_key_PBD, layout, **options)

    def dense(self) -> PoolLayout:
        return PoolLayout.dense(self.tokens, pool_size=len(self.ape_JD), batch=self.key_SBD.shape[1])

    def state(self, batch: int, **options: int) -> IndexerState:
        """Empty, of poisoned buffers."""
        with poisoned():
            return IndexerState(self.ape_JD, batch=batch, dtype=self.key_SBD.dtype, **options)


@st.composite
def batches(draw: st.DrawFn, *, max_tokens: int = 150) -> Batch:
    batch, pool_size, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 5)), draw(st.integers(1, max_tokens))
    heads, dim = draw(st.sampled_from([1, 2, 3, 8, 16])), draw(st.sampled_from([1, 3, 8, 16, 33]))
    kind, seed = draw(st.sampled_from(EXACT + ROUNDED)), draw(st.integers(0, 1 << 20))
    q, weights, key = numbers(kind, tokens, tokens, batch, heads, dim, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    # Next to equal gates keep the pools of keys that differ in their last bits next to equal.
    gate, ape = torch.randn(tokens, batch, dim, generator=generator), torch.randn(pool_size, dim, generator=generator)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    budget, use_relu = draw(st.integers(1, 8)), draw(st.sampled_from([True, True, False]))
    return Batch(q.to(dtype), weights, key.to(dtype), gate.to(dtype), ape, budget, use_relu)


class Decoder:
    """A state fed with some sequences of a batch, each as far as it likes; every selection is compared."""

    def __init__(self, case: Batch, draw: st.DrawFn) -> None:
        self.case, self.draw = case, draw
        self.window = draw(st.integers(0, 9))
        self.sample = list(range(case.key_SBD.shape[1]))
        self.done = [0] * len(self.sample)
        self.greatest = list(self.done)
        self.state = case.state(len(self.sample), capacity=case.tokens, rewind_window=self.window)
        self.trained_BSK = case.trained(case.dense())
        self.compared = 0

    def append(self, counts: list[int]) -> None:
        """The next tokens of each sequence, and rows of NaN that are not there before, behind and between them."""
        rows = max(counts) + self.draw(st.integers(0, 3))
        valid_BS = torch.zeros(len(counts), rows, dtype=torch.bool)
        whole = (self.case.q_SBHD, self.case.weights_SBH, self.case.key_SBD, self.case.gate_SBD)
        parts = [torch.full((rows, len(counts), *x.shape[2:]), torch.nan, dtype=x.dtype) for x in whole]
        expected = torch.full((len(counts), rows, self.case.budget), -1, dtype=torch.int32)
        for place, (sample, done, count) in enumerate(zip(self.sample, self.done, counts, strict=True)):
            row = torch.tensor(sorted(self.draw(st.permutations(range(rows)))[:count]), dtype=torch.int64)
            valid_BS[place, row] = True
            for part, x in zip(parts, whole, strict=True):
                part[row, place] = x[done : done + count, sample]
            expected[place, row] = self.trained_BSK[sample, done : done + count]
            self.done[place] += count
        self.greatest = [max(*pair) for pair in zip(self.greatest, self.done, strict=True)]
        q, weights, key, gate = parts
        # Where all is there, both ways to say so.
        mask = None if valid_BS.all() and self.draw(st.booleans()) else valid_BS
        self.state.append(key, gate, mask)
        with poisoned():
            options = {"budget": self.case.budget, "use_relu": self.case.use_relu}
            selection_BSK = self.state.select(q, weights, mask, **options)
        assert selection_BSK.dtype == torch.int32
        assert torch.equal(selection_BSK, expected)
        assert self.state.length_B.tolist() == self.done
        self.compared += sum(counts)

    def rewind(self) -> None:
        for place, done in enumerate(self.done):
            near = range(max(0, self.greatest[place] - self.window), done + 1)
            ends = range(0, done + 1, len(self.case.ape_JD))
            self.done[place] = self.draw(st.sampled_from([*near, *ends, done]))
        self.state.rewind(torch.tensor(self.done))

    def take(self) -> None:
        """Go on with some of the sequences, some of them twice; what becomes of the others reaches them no more."""
        old, places = self.state, self.draw(st.lists(st.sampled_from(range(len(self.sample))), min_size=1, max_size=4))
        self.state = old.take(torch.tensor(places))
        self.sample, self.done, self.greatest = (
            [values[place] for place in places] for values in (self.sample, self.done, self.greatest)
        )
        old.reset()
        alien = torch.full((old.capacity, old.batch, self.case.key_SBD.shape[2]), 7.0, dtype=self.case.key_SBD.dtype)
        old.append(alien, alien)


def test_pieces_rewinds_and_copies_change_no_selection() -> None:
    compared, contested = 0, 0

    @settings(max_examples=150)
    @given(batches(), st.data())
    def run(case: Batch, data: st.DataObject) -> None:
        nonlocal compared, contested
        decoder = Decoder(case, data.draw)
        for action in data.draw(st.lists(st.sampled_from(["append", "append", "rewind", "take"]), max_size=8)):
            if action == "append":
                left = [case.tokens - done for done in decoder.done]
                decoder.append([data.draw(st.integers(0, least)) for least in left])
            else:
                getattr(decoder, action)()
        decoder.append([case.tokens - done for done in decoder.done])
        compared += decoder.compared
        contested += int((decoder.trained_BSK[..., -1] >= 0).sum())

    # What is drawn decides how many a run compares.
    while compared < 20_000 or contested < 10_000:
        run()


def pieces(draw: st.DrawFn, tokens: int) -> Iterator[slice]:
    """All tokens at once, token by token, or a prefill in some pieces and the rest token by token."""
    done, prefill = 0, draw(st.sampled_from([tokens, 0, draw(st.integers(0, tokens))]))
    while done < tokens:
        step = draw(st.integers(1, prefill - done)) if done < prefill else 1
        yield slice(done, done + step)
        done += step


def test_left_padding_as_in_training() -> None:
    """A padded batch in pieces, with its mask: the selections of the layout made from the whole mask."""
    compared = 0

    @settings(max_examples=40)
    @given(batches(), st.data())
    def run(case: Batch, data: st.DataObject) -> None:
        nonlocal compared
        batch = case.key_SBD.shape[1]
        padding = torch.tensor(data.draw(st.lists(st.integers(0, case.tokens), min_size=batch, max_size=batch)))
        valid_BS = torch.arange(case.tokens) >= padding.unsqueeze(1)
        trained_BSK = case.trained(PoolLayout.from_padding_mask(valid_BS, pool_size=len(case.ape_JD)))
        state = case.state(batch, capacity=case.tokens - int(padding.min()) or 1)
        for part in pieces(data.draw, case.tokens):
            state.append(case.key_SBD[part], case.gate_SBD[part], valid_BS[:, part])
            selection_BSK = state.select(
                case.q_SBHD[part],
                case.weights_SBH[part],
                valid_BS[:, part],
                budget=case.budget,
                use_relu=case.use_relu,
            )
            assert torch.equal(selection_BSK, trained_BSK[:, part])
        compared += int(valid_BS.sum())

    run()
    assert compared >= 2_000


def test_a_long_sequence_token_by_token() -> None:
    """Several tiles of pools, at the real number of heads and channels: every score of a low tile counts here."""
    tokens, batch, budget = 1_400, 2, 64
    q, weights, key = numbers("near", tokens, tokens, batch, 32, 128, 5)
    generator = torch.Generator().manual_seed(6)
    gate, ape = torch.randn(tokens, batch, 128, generator=generator), torch.randn(2, 128, generator=generator)
    key = key * (1 + 2.0**-20 * torch.randn(tokens, batch, 1, generator=generator))
    case = Batch(q, weights, key, gate, ape, budget, use_relu=True)
    trained_BSK, state = case.trained(case.dense()), case.state(batch, capacity=tokens)
    state.append(key[:600], gate[:600])
    assert torch.equal(state.select(q[:600], weights[:600], budget=budget), trained_BSK[:, :600])
    for token in range(600, tokens):
        part = slice(token, token + 1)
        state.append(key[part], gate[part])
        assert torch.equal(state.select(q[part], weights[part], budget=budget), trained_BSK[:, part])


@torch.no_grad()
def test_equal_sets_to_transformers_cached_decode() -> None:
    """fp32, left padding, a prefill and then token by token, of what its modules made at each step."""
    torch.manual_seed(4)
    compared = contested = 0
    for pool_size, index_topk, tail, heads, dim in ((4, 32, True, 16, 32), (3, 24, False, 8, 20)):
        indexer = build_indexer(pool_size, index_topk, tail, heads, dim)
        batch, length, prefill = 3, 330, 90
        valid_BS = torch.arange(length) >= torch.tensor([[0], [31], [7]])
        layout = PoolLayout.from_padding_mask(valid_BS, pool_size=pool_size)
        cache = Cache(layers=[DynamicIndexedLayer()])
        state = IndexerState(indexer.index_kpool_compress_ape, batch=batch, capacity=length, dtype=torch.float32)
        for start, stop in [(0, prefill), *((token, token + 1) for token in range(prefill, length))]:
            hidden, q_resid = torch.randn(batch, stop - start, HIDDEN), torch.randn(batch, stop - start, Q_LORA)
            valid = valid_BS[:, start:stop]
            cache.update(*[torch.zeros(batch, 1, stop - start, 1)] * 2, 0)
            theirs = indexer(hidden_states=hidden, q_resid=q_resid, attention_mask=valid, cache=cache)
            q = indexer.wq_b(q_resid).unflatten(-1, (heads, dim)).transpose(0, 1)
            weights = indexer.weights_proj(hidden).transpose(0, 1) * (heads**-0.5 * dim**-0.5)
            key = indexer.k_norm(indexer.wk(hidden)).transpose(0, 1)
            gate = torch.nn.functional.linear(hidden, indexer.index_kpool_compress_gate).transpose(0, 1)
            state.append(key, gate, valid)
            selection = state.select(q, weights, valid, budget=index_topk // pool_size)
            ours = expand_selection(selection, layout, torch.arange(start, stop), always_select_tail=tail)
            assert torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
            compared += int(valid.sum())
            contested += int((selection[..., -1] >= 0).sum())
    assert compared >= 1_900
    assert contested >= 1_600
