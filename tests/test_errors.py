"""The tables of docs/errors.md against the sources: every message is in one row, and every row is of some message."""

import re
from collections import Counter

from sentences import ROOT, of_package, sentences, subject

TABLE = ROOT / "docs" / "errors.md"


def listed() -> Counter[str]:
    """How often each beginning stands in a first column."""
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    return Counter(begins for row in rows for begins in re.findall(r"`([^`]+)`", row.split(" | ")[0]))


def test_every_message_is_in_the_tables_once() -> None:
    known = listed()
    assert {begins: places for begins, places in of_package().items() if begins not in known} == {}
    assert [begins for begins, count in known.items() if count > 1] == []


def test_every_row_is_of_some_message() -> None:
    assert listed().keys() - of_package().keys() == set()


def test_every_row_has_cause_and_remedy() -> None:
    rows = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert all(len(row.strip("| ").split(" | ")) == 3 for row in rows)


def test_messages_are_found_where_they_are_raised_or_listed() -> None:
    source = '''
def f(name, faults):
    """NAME is VALUE; accepted is WHAT."""
    if name: raise ValueError(f"{name} has shape {1}; accepted is one")
    faults.append(f"budget is {name!r}; accepted is an integer")
    return [f"heads[{name}] are none; accepted are some"] + [f"it holds {name}" "; accepted" " is nothing"]
'''
    found = [text for _, text in sorted(sentences(source))]
    assert [subject(text) for text in found] == ["… has shape …", "budget", "heads[…]", "it"]
