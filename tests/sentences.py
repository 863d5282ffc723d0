"""What the package says when it refuses something, read from its sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
_VERBS = "is|are|was|has|have|holds?|lacks|adds|brings|repeats|selects|cuts|depends|recomputes"
_VERBS += "|differs?|cannot|stands|begins"
_SUBJECT = re.compile(rf"(.+?)(?: (?:{_VERBS})\b|[;:=]| \()")
# Kinds that are not for a caller to see: what is caught inside, and one's own invariants.
_INTERNAL = {"AssertionError", "LookupError", "_FaultyRanksError", "BaseException"}


def written(node: ast.AST) -> str:
    """A literal as it will read, `…` standing for what is put in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return written(node.left) + written(node.right)
    return "…"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr | ast.Constant | ast.BinOp)


def sentences(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every literal with `; accepted` in it, and of whatever else is raised with a text."""
    inner: set[ast.AST] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            # Docstrings say what is accepted too.
            inner.add(node.value)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind, arguments = ast.unparse(node.exc.func), node.exc.args
            if arguments and kind not in _INTERNAL and written(arguments[0]).strip("… \n"):
                yield node.lineno, written(arguments[0])
                inner.update(ast.walk(arguments[0]))
        elif _is_text(node) and node not in inner and "; accepted" in written(node):
            yield node.lineno, written(node)
            inner.update(ast.walk(node))


def subject(sentence: str) -> str:
    """What a sentence is about: its words up to the verb, up to what is accepted where they are not known."""
    match = _SUBJECT.match(sentence)
    words = match[1] if match else sentence
    return words if words.strip("… \n") else sentence.partition(";")[0]


def of_package() -> dict[str, list[str]]:
    """Where each subject stands in the sources, `FILE:LINE`."""
    found: dict[str, list[str]] = {}
    for path in sorted([*(ROOT / "mcore_dsa").rglob("*.py"), *(ROOT / "patches").glob("*.py")]):
        for line, sentence in sentences(path.read_text(encoding="utf-8")):
            found.setdefault(subject(sentence), []).append(f"{path.relative_to(ROOT)}:{line}")
    return found
