"""The rules of CONTRIBUTING.md that a parser can check. Each rule is shown to bite on a source that breaks it."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module imports only from its own entry and from entries before it. "" is mcore_dsa/__init__.py itself.
ORDER = (
    "settings",
    "hf_config",
    "geometry",
    "ranges",
    "precision",
    "eager",
    "checks",
    "files",
    "workspace",
    "rows",
    "kpool",
    "plan",
    "reference",
    "kernels",
    "backends",
    "collectives",
    "head_exchange",
    "attend",
    "functions",
    "agreement",
    "sharded",
    "fused",
    "source",
    "work",
    "attention_work",
    "state",
    "tp_plan",
    "safetensors_files",
    "tensor_files",
    "binding",
    "checkpoint",
    "record",
    "replay",
    "rollout",
    "",
    "megatron",
    "patches",
    "train",
    "cli",
)
NEEDS_MEGATRON = {"patches", "megatron", "train"}
STRANGERS = {frozenset({"reference", "kernels"})}
READS_ENVIRONMENT = {"settings", "patches", "train"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}

CHECKED_FOLDERS = ("mcore_dsa", "patches", "tests", "gpu_ci", "benchmarks")
FILE_LINES = 400
FUNCTION_LINES = 60
KERNEL_LINES = 100


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "patches":
        parts.insert(0, "mcore_dsa")
    return ".".join(parts).removesuffix(".__init__")


def package_sources() -> dict[str, str]:
    return {module_name(path): path.read_text(encoding="utf-8") for path in python_files("mcore_dsa", "patches")}


def entry(module: str) -> str:
    """The entry of ORDER that a module of the package belongs to."""
    return module.partition(".")[2].partition(".")[0]


def imports(module: str, source: str, known: set[str], is_package: bool) -> set[str]:
    """Absolute names of the modules that ``source`` imports anywhere, inside functions and behind TYPE_CHECKING too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".")[: None if is_package and node.level == 1 else -node.level + is_package]
            base = ".".join([*package, *([node.module] if node.module else [])]) if node.level else str(node.module)
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "import_module"):
            found |= {argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)}
    return found


def import_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    packages = {name.rpartition(".")[0] for name in sources} | {"mcore_dsa"}
    return {name: imports(name, source, set(sources), name in packages) for name, source in sources.items()}


def import_faults(sources: dict[str, str]) -> list[str]:
    faults = [f"{module} is in no entry of ORDER" for module in sources if entry(module) not in ORDER]
    graph = import_graph(sources)
    own: dict[str, set[str]] = {}
    for module, imported in graph.items():
        here = entry(module)
        own[module] = {name for name in imported if name.split(".")[0] == "mcore_dsa" and name != module}
        if here not in NEEDS_MEGATRON:
            faults += [f"{module} imports {name}" for name in sorted(imported) if name.split(".")[0] == "megatron"]
        if here not in ORDER:
            continue
        for name in sorted(own[module]):
            there = entry(name)
            if there not in ORDER or ORDER.index(there) > ORDER.index(here) or {here, there} in STRANGERS:
                faults.append(f"{module} imports {name}")
    try:
        TopologicalSorter(own).prepare()
    except CycleError as error:
        faults.append(f"cycle {' -> '.join(error.args[1])}")
    return faults


def environment_faults(sources: dict[str, str]) -> list[str]:
    faults = []
    for module, source in sources.items():
        if entry(module) in READS_ENVIRONMENT:
            continue
        for node in ast.walk(ast.parse(source)):
            by_attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
            by_name = isinstance(node, ast.ImportFrom) and ENVIRONMENT & {alias.name for alias in node.names}
            if by_attribute or by_name:
                faults.append(f"{module}:{node.lineno} reads the environment")
    return faults


def size_faults(name: str, source: str, function_lines: int) -> list[str]:
    lines = len(source.splitlines())
    faults = [f"{name} has {lines} lines"] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > function_lines:
                faults.append(f"{name}:{node.lineno} {node.name} has {length} lines")
    return faults


def test_imports_run_in_one_direction() -> None:
    assert import_faults(package_sources()) == []


def test_only_settings_read_the_environment() -> None:
    assert environment_faults(package_sources()) == []


def test_functions_and_files_are_short() -> None:
    faults = []
    for path in python_files(*CHECKED_FOLDERS):
        name = str(path.relative_to(ROOT))
        limit = KERNEL_LINES if name.startswith("mcore_dsa/kernels/") else FUNCTION_LINES
        faults += size_faults(name, path.read_text(encoding="utf-8"), limit)
    assert faults == []


@pytest.mark.parametrize(
    ("module", "source", "fault"),
    [
        ("mcore_dsa.rows", "from mcore_dsa.kpool import f", "mcore_dsa.rows imports mcore_dsa.kpool"),
        ("mcore_dsa.rows", "from mcore_dsa import kpool", "mcore_dsa.rows imports mcore_dsa.kpool"),
        ("mcore_dsa.rows", "from . import kpool", "mcore_dsa.rows imports mcore_dsa.kpool"),
        ("mcore_dsa.rows", "from .kpool import f", "mcore_dsa.rows imports mcore_dsa.kpool"),
        ("mcore_dsa.rows", "def f():\n    import mcore_dsa.kpool", "mcore_dsa.rows imports mcore_dsa.kpool"),
        ("mcore_dsa.rows", "from mcore_dsa import __version__", "mcore_dsa.rows imports mcore_dsa"),
        ("mcore_dsa", "from .megatron import spec", "mcore_dsa imports mcore_dsa.megatron"),
        (
            "mcore_dsa.kernels.scores",
            "from ..reference import f",
            "mcore_dsa.kernels.scores imports mcore_dsa.reference",
        ),
        ("mcore_dsa.functions", "from megatron.core import mpu", "mcore_dsa.functions imports megatron.core"),
        (
            "mcore_dsa.functions",
            "importlib.import_module('megatron')",
            "mcore_dsa.functions imports megatron",
        ),
        ("mcore_dsa.helpers", "", "mcore_dsa.helpers is in no entry of ORDER"),
        ("mcore_dsa.train.loop", "from mcore_dsa.train.job import f", "cycle "),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, source: str, fault: str) -> None:
    sources = {
        "mcore_dsa": "",
        "mcore_dsa.kpool": "import torch",
        "mcore_dsa.kernels": "",
        "mcore_dsa.megatron": "import megatron.core\nfrom mcore_dsa.kpool import f",
        "mcore_dsa.train": "",
        "mcore_dsa.train.job": "from mcore_dsa.train import loop",
    }
    assert import_faults(sources) == []
    (found,) = import_faults(sources | {"mcore_dsa.train.loop": "", module: source})
    assert found.startswith(fault)


@pytest.mark.parametrize(
    "source", ["import os\nos.environ['A']", "import os as o\no.getenv('A')", "from os import environ"]
)
def test_a_read_of_the_environment_is_found(source: str) -> None:
    assert len(environment_faults({"mcore_dsa.rows": source})) == 1
    assert environment_faults({"mcore_dsa.settings": source, "mcore_dsa.train.job": source}) == []


def test_a_long_function_and_a_long_file_are_found() -> None:
    body = "    pass\n"
    assert size_faults("a.py", "def f():\n" + body * 59, 60) == []
    assert size_faults("a.py", "def f():\n" + body * 60, 60) == ["a.py:1 f has 61 lines"]
    assert size_faults("a.py", "pass\n" * 400, 60) == []
    assert size_faults("a.py", "pass\n" * 401, 60) == ["a.py has 401 lines"]


SHAPED = re.compile(r"[a-z][a-z0-9_]*_(?=[1x]*[A-Z])([A-Z1x]{1,5})")


def legend() -> set[str]:
    """The letters that `mcore_dsa/__init__.py` explains."""
    text = ast.get_docstring(ast.parse((ROOT / "mcore_dsa" / "__init__.py").read_text(encoding="utf-8"))) or ""
    lines = [line for line in text.splitlines() if line.startswith("    ")]
    return {letter for line in lines for letter in re.findall(r"(?:^| {2,}|, )([A-Zx1])(?=[ ,])", line)}


def letter_faults(sources: dict[str, str], known: set[str]) -> list[str]:
    faults = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            name = getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "attr", None)
            if isinstance(name, str) and (match := SHAPED.fullmatch(name)) and not set(match[1]) <= known:
                faults.append(f"{module} names {name}")
    return faults


def voice_faults(sources: dict[str, str]) -> list[str]:
    """Messages and docstrings in another voice: `must be`, `got`, double backticks, roles of Sphinx."""
    faults = []
    for module, source in sources.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                faults += [f"{module}:{node.lineno} says {word}" for word in VOICES if re.search(word, node.value)]
    return faults


VOICES = (
    r"``",
    r":(class|func|meth|attr):",
    r" must be (an?|one|positive|the|in)\b",
    r", got $",
    r" refused; accepted: ",
)


def test_shapes_use_the_letters_of_the_one_legend() -> None:
    known = legend()
    assert {"S", "B", "H", "D", "O", "K", "x", "1", "F", "U"} <= known
    assert letter_faults(package_sources(), known) == []
    assert letter_faults({"a": "def f(q_SBHZ):\n    return q_SBHZ"}, known) == ["a names q_SBHZ"] * 2


def test_messages_and_docstrings_are_in_one_voice() -> None:
    assert voice_faults(package_sources()) == []
    assert len(voice_faults({"a": 'raise ValueError(f"n must be a size, got {n}")'})) == 2
