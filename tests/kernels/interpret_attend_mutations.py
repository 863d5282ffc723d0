"""What the tests of attention's kernels can see: one wrong line at a time, and the check that it fails.

Each check is a small case of the properties in `interpret_attend.py`. What an interpreter cannot see, the compiler's
tests and `gpu_ci/` have to: docs/attention_kernels.md has the list.
"""

import faulthandler
import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import interpret_attend as checks
import pytest
import torch
from attend_bounds import error_bounds
from attend_cases import Case, assert_equal
from draw import poisoned
from strict_interpreter import backwards

KERNELS = ("items", "attend_rows", "attend_slots")
DRIVER = "mcore_dsa.backends.triton.attend"


def packs(dtype: torch.dtype = torch.float32, **options: int) -> Case:
    """Rows of two documents and two samples, with tails and without, before a document and at its end."""
    sizes = {"heads": 2, "channels": 20, "budget": 2, **options}
    case = Case.random([[(0, 10), (10, 14)], [(2, 13)]], 14, pool_size=3, **sizes)
    return case.rows(torch.tensor([1, 7, 9, 13])).to(dtype)


def within(case: Case, parts: int) -> None:
    """The output, and the gradients of queries and of latents, as far as they are asked for."""
    with poisoned(checks.NAN):
        got = checks.run(case) if parts > 1 else (checks.attended(case, case.q, case.kv),)
    exact, dtype = case.to(torch.float64), case.q.dtype
    bounds = error_bounds(exact, out=checks.ROUNDOFF[dtype], split=checks.SPLIT[dtype])
    for ours, want, bound in zip(got, exact.run_oracle(), bounds, strict=False):
        assert bool(((ours - want).abs() <= bound).all())


def forward() -> None:
    within(packs(), 1)


def forward_of_groups() -> None:
    within(packs(heads=17).rows(slice(2, 3)), 1)


def forward_of_tiles() -> None:
    within(checks.wide_case().rows(slice(0, 1)), 1)


def forward_without_tokens() -> None:
    within(packs(budget=0).rows(slice(0, 1)), 1)
    case = packs()
    within(replace(case, selection=torch.full_like(case.selection, -1), tail=False).rows(slice(1, 2)), 1)


def backward() -> None:
    within(packs(), 3)


def backward_of_groups() -> None:
    within(packs(heads=17).rows(slice(2, 3)), 3)


def backward_of_tiles() -> None:
    within(checks.wide_case().rows(slice(0, 1)), 3)


def backward_of_a_tile_of_tail() -> None:
    within(Case.random([[(0, 23)]], 23, heads=1, budget=4).rows(torch.tensor([22])), 3)


def backward_of_parts() -> None:
    """Of pools of five tokens, of which a program adds up four; pools that the tokens end in."""
    case = Case.random([[(0, 14)], [(1, 13)]], 14, heads=1, channels=20, budget=1, pool_size=5)
    within(case.rows(torch.tensor([9, 11, 13])), 3)


def backward_of_a_chain() -> None:
    within(checks.popular_pool(2 * checks.CHAIN + 3), 3)


def backward_backwards() -> None:
    """Forward, what a program writes into the lines of those behind it is written over."""
    with backwards():
        within(packs(), 3)


def in_bf16() -> None:
    within(packs(torch.bfloat16), 3)
    checks.test_a_row_of_one_token_has_no_gradient_through_its_weight()


def in_pieces() -> None:
    case = packs()
    assert_equal(checks.run(case, attend_bytes=checks.least(case)), checks.run(case))


def without_tokens() -> None:
    checks.test_every_slot_is_written_and_nothing_else_read(torch.float32)


def refused() -> None:
    for row, ids, said in checks.REFUSED.values():
        checks.test_bad_ids_are_refused(row, ids, said)
    checks.test_ids_of_wide_rows_are_checked_to_the_last()


Check = Callable[[], None]
TESTED: tuple[Check, ...] = (without_tokens, refused)
LOW = 'total = tl.dot(values, low.to(values.dtype), total, input_precision="ieee")'

# Name: module, line, what stands in its place, and what sees it.
MUTATIONS: dict[str, tuple[str, str, str, Check]] = {
    "the tail is left out": ("items", "if not TAIL:", "if TAIL:", forward),
    "the tail begins a token early": ("items", "+ 1 - tail - visible", "- tail - visible", forward),
    "every document is the first": ("items", "pool - first, visible)", "pool, visible)", forward),
    "every sample is the first": ("items", "place = sample * rows + row", "place = row", forward),
    "an id of -1 is taken": ("items", "(rank >= 0) & (", "(", forward_without_tokens),
    "one pool too many is visible": ("items", "(rank >= visible)", "(rank > visible)", refused),
    "equal ids ascend": ("items", "(pool <= before)", "(pool < before)", refused),
    "ids may stand behind -1": ("items", "((before < 0) | ", "(", refused),
    "ids may be below -1": ("items", " | (pool < -1)", "", refused),
    "only the first ids are looked at": ("items", "range(0, budget, COLUMNS)", "range(0, COLUMNS, COLUMNS)", refused),
    "the edge of a block is not compared": (
        "items",
        "before = tl.load(selection_ptr + column - 1, mask=(column > 0)",
        "before = tl.load(selection_ptr + column - 1, mask=(column > start)",
        refused,
    ),
    "slots behind the last hold tokens": ("attend_rows", "seen & (slot < slots)", "seen", forward),
    "a pool is its first token": ("attend_rows", "rank * J + slot % J", "rank * J", forward),
    "unused slots have logits": ("attend_rows", 'tl.where(used[:, None], logits, float("-inf"))', "logits", forward),
    "channels that are not there": ("attend_rows", "mask & (channel < C)[None, :]", "mask", forward),
    "the second heads are the first": ("attend_rows", "% groups * HEADS", "% groups * 0", forward_of_groups),
    "nothing before the first token": (
        "attend_rows",
        'tl.where(higher == float("-inf"), 0.0, higher)',
        "higher",
        forward_without_tokens,
    ),
    "rows without tokens": ("attend_rows", "tl.where(tokens > 0, norm, 1.0)", "norm", forward_without_tokens),
    "the norm is not rescaled": ("attend_rows", "norm = norm * fade", "norm = norm", forward_of_tiles),
    "the mixture is not rescaled": ("attend_rows", "mixed * fade[None, :]", "mixed", forward_of_tiles),
    "the peak is not kept": ("attend_rows", "peak = higher", "peak = peak", forward_of_tiles),
    "the last tile is left out": (
        "attend_rows",
        "range(0, slots, SLOTS)",
        "range(0, slots - slots % SLOTS, SLOTS)",
        forward_of_tiles,
    ),
    "the low part of weights is left out": ("attend_rows", LOW, "total = total", in_bf16),
    "the sum of weights' gradients is not mended": (
        "attend_rows",
        "(tl.trans(mixed) - (delta - guess)[:, None] * out)",
        "tl.trans(mixed)",
        in_bf16,
    ),
    "the sum of weights' gradients is left out": (
        "attend_rows",
        "(weight_grad - guess[None, :])",
        "weight_grad",
        backward,
    ),
    "log2(e) is left in": ("attend_rows", "(scale * 0.6931471805599453)", "scale", backward),
    "what comes to rows without tokens": (
        "attend_rows",
        'tl.where((norm == float("-inf"))[:, None], 0.0, q_grad)',
        "q_grad",
        without_tokens,
    ),
    "delta is not stored": (
        "attend_rows",
        "tl.store(delta_ptr + line, delta,",
        "tl.store(delta_ptr + line, 0 * delta,",
        backward,
    ),
    "a tile that holds the tail alone": (
        "attend_slots",
        "if start >= columns * J + tail:",
        "if start >= columns * J:",
        backward_of_a_tile_of_tail,
    ),
    "every row is the first": ("attend_slots", "from_item.to(tl.int64) + here", "here.to(tl.int64)", in_pieces),
    "tiles are one": (
        "attend_slots",
        "* width + start + tl.arange(0, SLOTS)",
        "* width + tl.arange(0, SLOTS)",
        backward_of_tiles,
    ),
    "the second heads do not count": (
        "attend_slots",
        "range(0, heads, HEADS)",
        "range(0, HEADS, HEADS)",
        backward_of_groups,
    ),
    "the value's part is left out": (
        "attend_slots",
        "total = add_product(total, tl.trans(out_grad), weights, SPLIT)",
        "total = total",
        backward,
    ),
    "the key's part is left out": (
        "attend_slots",
        "total = add_product(total, tl.trans(q), logit_grad, SPLIT)",
        "total = total",
        backward,
    ),
    "delta is ignored": ("attend_slots", "(weight_grad - delta[:, None])", "weight_grad", backward),
    "cells of all samples are one": ("attend_slots", "sample * tokens + origin", "origin", backward),
    "pools are a token long": ("attend_slots", "origin + rank * J", "origin + rank", backward),
    "the tail attends no cell": ("attend_slots", " | ((column == filled) & (tail > 0))", "", backward),
    "cells of all rows are one row's": ("attend_slots", "cell_ptr + here * columns", "cell_ptr", backward),
    "cells are added again": ("attend_slots", "| (cell == before)", "", backward),
    "the tail's later tokens": ("attend_slots", "seen = token <= tl.sum(", "seen = token <= 9999 + tl.sum(", backward),
    "a row's own token is left out": ("attend_slots", "seen = token <= tl.sum(", "seen = token < tl.sum(", backward),
    "what rows before came to is lost": (
        "attend_slots",
        "total = tl.load(place, mask=mine & (token < tokens)[:, None], other=0.0)",
        "total = tl.zeros([TOKENS, C_PADDED], tl.float32)",
        in_pieces,
    ),
    "every column is the first": ("attend_slots", "column_X % columns * J", "0", backward),
    "every entry is of the first row": (
        "attend_slots",
        "item_X = column_X // columns",
        "item_X = column_X * 0",
        backward,
    ),
    "another cell's entries are added": (
        "attend_slots",
        "tl.where(follows_X, tl.load(",
        "tl.where(follows_X | True, tl.load(",
        backward,
    ),
    "an entry is left out": ("attend_slots", "entry += CHAIN", "entry += CHAIN + 1", backward_of_a_chain),
    "an entry is added twice": ("attend_slots", "entry += CHAIN", "entry += CHAIN - 1", backward_of_a_chain),
    "every part is the first": ("attend_slots", "% parts * TOKENS", "% parts * 0", backward_of_parts),
    "a cell has one part": ("attend_slots", "tl.program_id(0) // parts", "tl.program_id(0)", backward_of_parts),
    "tokens past the last are read": ("attend_slots", "mine & (token < tokens)[:, None]", "mine", backward_of_parts),
    "norms of heads that are not there": (
        "attend_rows",
        "peak + tl.log2(norm), mask=head < heads)",
        "peak + tl.log2(norm))",
        backward_backwards,
    ),
    "delta of heads that are not there": (
        "attend_rows",
        "tl.store(delta_ptr + line, delta, mask=head < heads)",
        "tl.store(delta_ptr + line, delta)",
        backward_backwards,
    ),
    "heads that are not there are stored": (
        "attend_rows",
        "mask = used[:, None] & (channel < C)[None, :]",
        "mask = (used[:, None] | True) & (channel < C)[None, :]",
        backward_backwards,
    ),
    "channels that are not there are stored": (
        "attend_rows",
        "mask = used[:, None] & (channel < C)[None, :]",
        "mask = used[:, None] & (channel >= 0)[None, :]",
        backward_backwards,
    ),
    "channels of a slot that are not there": (
        "attend_slots",
        "mask = used[None, :] & (channel < C)[:, None]",
        "mask = used[None, :] & (channel >= 0)[:, None]",
        backward_backwards,
    ),
    "columns that are not there have cells": (
        "attend_slots",
        "mask=column < columns)",
        "mask=column >= 0)",
        backward_backwards,
    ),
}


# The others are tests of their own.
@pytest.mark.parametrize("check", dict.fromkeys(check for *_, check in MUTATIONS.values() if check not in TESTED))
def test_the_kernels_pass(check: Check) -> None:
    check()


@pytest.mark.parametrize("name", MUTATIONS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_line_is_seen(name: str, tmp_path: Path) -> None:
    module, line, wrong, check = MUTATIONS[name]
    source = Path(str(importlib.import_module(f"mcore_dsa.kernels.{module}").__file__)).read_text(encoding="utf-8")
    assert line in source
    path = tmp_path / f"{module}.py"
    path.write_text(source.replace(line, wrong), encoding="utf-8")
    assert fails(check, module, path)


def fails(check: Check, module: str, path: Path) -> bool:
    """Whether a check fails with a module from `path`, in a process of its own: what writes anywhere may end it."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        passed = False
        try:
            install(module, path)
            check()
            passed = True
        finally:
            os._exit(0 if passed else 1)
    return os.waitpid(child, 0)[1] != 0


def install(module: str, path: Path) -> None:
    """Load a module in the place of the package's, and anew what imports it."""
    for name in KERNELS[KERNELS.index(module) :]:
        sys.modules.pop(f"mcore_dsa.kernels.{name}", None)
    sys.modules.pop(DRIVER, None)
    spec = spec_from_file_location(f"mcore_dsa.kernels.{module}", path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[spec.name])
    importlib.import_module(DRIVER)
