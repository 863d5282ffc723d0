"""What a user installs: the package list, the pins, and what an import needs."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINNED_FILES = sorted(ROOT.glob("requirements*.txt"))

# The package needs torch and nothing else: every other library is refused while all of its modules that stand above
# mcore_dsa.megatron are imported. Torch comes first and keeps what it brought along itself.
IMPORT_WITH_TORCH_ONLY = """
import importlib, sys
import torch

REFUSED = set(sys.argv[1].split(","))

class Refuse:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in REFUSED:
            raise ModuleNotFoundError(f"{name} is refused here", name=name)

brought_by_torch = {name for name in REFUSED if name in sys.modules}
sys.meta_path.insert(0, Refuse)
for module in sys.argv[2].split(","):
    importlib.import_module(module)
print(sorted(REFUSED & {name.partition(".")[0] for name in sys.modules} - brought_by_torch))
"""
REFUSED = (
    "apex,jsonargparse,megatron,psutil,safetensors,tensorboard,tokenizers,tqdm,"
    "transformer_engine,transformers,triton,yaml"
)


def run_python(program: str, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_needs_torch_only(tmp_path: Path) -> None:
    files = sorted((ROOT / "mcore_dsa").glob("*.py"))
    modules = ["mcore_dsa", *(f"mcore_dsa.{path.stem}" for path in files if path.stem not in ("__init__", "cli"))]
    printed = run_python(IMPORT_WITH_TORCH_ONLY, REFUSED, ",".join(modules), cwd=tmp_path)
    assert printed == "[]"


NEEDY = """
for statement in ("import triton", "from megatron.core import mpu"):
    try:
        exec(statement)
    except ModuleNotFoundError as error:
        print(error)
"""


def test_the_refusal_refuses(tmp_path: Path) -> None:
    (tmp_path / "needy.py").write_text(NEEDY, encoding="utf-8")
    printed = run_python(IMPORT_WITH_TORCH_ONLY, REFUSED, "needy", cwd=tmp_path)
    assert printed.splitlines() == ["triton is refused here", "megatron is refused here", "[]"]


def test_patches_are_importable_under_the_package_from_anywhere_and_load_no_megatron(tmp_path: Path) -> None:
    program = "import sys, mcore_dsa.patches as patches; print(patches.__file__, 'megatron' in sys.modules)"
    assert run_python(program, cwd=tmp_path) == f"{ROOT / 'patches' / '__init__.py'} False"


def test_every_package_is_listed() -> None:
    files = [*(ROOT / "mcore_dsa").rglob("__init__.py"), *(ROOT / "patches").rglob("__init__.py")]
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in files}
    found = {f"mcore_dsa.{name}" if name.startswith("patches") else name for name in found}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_the_installed_version_is_the_package_version() -> None:
    import mcore_dsa

    assert metadata("mcore-dsa")["Version"] == mcore_dsa.__version__


def pins() -> dict[str, Requirement]:
    lines = [line for file in PINNED_FILES for line in file.read_text(encoding="utf-8").splitlines()]
    parsed = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def test_pins_are_exact_and_lie_in_the_declared_ranges() -> None:
    pinned = pins()
    assert all(re.fullmatch(r"==[0-9][0-9a-z.]*", str(pin.specifier)) for pin in pinned.values())
    extras = PROJECT["project"]["optional-dependencies"]
    # Transformer Engine cannot be installed without CUDA; of Weights & Biases the tests have a stand-in.
    pinned_extras = [name for name in extras if name not in ("te", "wandb")]
    declared = PROJECT["project"]["dependencies"] + [line for name in pinned_extras for line in extras[name]]
    for requirement in map(Requirement, declared):
        if requirement.name != PROJECT["project"]["name"]:
            pin = pinned[canonicalize_name(requirement.name)]
            (version,) = (specifier.version for specifier in pin.specifier)
            assert requirement.specifier.contains(version), f"{pin} is outside {requirement}"
            assert requirement.extras <= pin.extras


def test_nothing_of_one_machine_is_written_down() -> None:
    links = r"https?:|file:|git\+|--(extra-)?index-url|--find-links"
    folders = r"(?<![\w./$)])/(work|root|home|opt|tmp|mnt|usr/local)/"
    machine = re.compile(f"{links}|{folders}")
    for path in [*PINNED_FILES, ROOT / "pyproject.toml", ROOT / "Makefile", ROOT / ".ci" / "run"]:
        text = re.sub(r"(?s)\[project\.urls\].*?(?=\n\[|\Z)", "", path.read_text(encoding="utf-8"))
        assert machine.search(text) is None, path
