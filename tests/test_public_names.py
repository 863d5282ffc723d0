"""The names of the package: found when they are asked for, by people, type checkers and `import *` alike."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import mcore_dsa


def shown_to_type_checkers() -> dict[str, str]:
    """Names and their modules, of the imports that only a type checker follows."""
    tree = ast.parse(Path(mcore_dsa.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    return {alias.name: str(node.module) for node in block.body for alias in node.names}


def test_every_name_is_the_one_of_its_module() -> None:
    homes = shown_to_type_checkers()
    assert sorted(homes) == mcore_dsa.__all__
    for name, home in homes.items():
        assert getattr(mcore_dsa, name) is getattr(import_module(home), name)
        assert name in dir(mcore_dsa)
    assert "__version__" in dir(mcore_dsa)


def test_a_name_that_is_none_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="'mcore_dsa' has no attribute 'select_pool'"):
        mcore_dsa.select_pool  # noqa: B018
    assert not hasattr(mcore_dsa, "torch")


def test_torch_is_imported_with_the_first_name() -> None:
    program = """
import sys
import mcore_dsa
assert mcore_dsa.__version__
print("torch" in sys.modules)
from mcore_dsa import DsaGeometry, DsaTpPlan
print("torch" in sys.modules)
from mcore_dsa import *
print("torch" in sys.modules, PoolLayout is mcore_dsa.PoolLayout)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["False", "False", "True True"]
