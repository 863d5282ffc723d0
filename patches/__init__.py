"""Temporary changes to the installed megatron-core; README.md beside this file says what retires each.

Importing this package does not import Megatron: that happens in `apply`.
"""

import importlib

from mcore_dsa.patches import carrier, checkpoint, cpu, recompute, rotary, without_te
from mcore_dsa.patches.registry import MissingSymbolError, Outcome, Patch, PatchReport, apply_patches

__all__ = ["PATCHES", "MissingSymbolError", "Outcome", "Patch", "PatchReport", "apply", "apply_patches"]

PATCHES = (
    *cpu.PATCHES,
    *recompute.PATCHES,
    *carrier.PATCHES,
    *rotary.PATCHES,
    *checkpoint.PATCHES,
    *without_te.PATCHES,
)

# On megatron.core and not in this module, so that reloading this module cannot apply the patches a second time.
MARKER = "__mcore_dsa_patches__"


def apply() -> PatchReport:
    """Make the installed megatron-core run the paths this project uses; what was done is returned and logged.

    A second call changes nothing and returns the first report. Patches that stand in for CUDA are left out where
    `torch.cuda.is_available()`; those for what is wrong on every device are not.

    Raises: MissingSymbolError where the installed megatron-core lacks a symbol that a patch replaces, and nothing was
    changed; ModuleNotFoundError where it is not installed.
    """
    core = importlib.import_module("megatron.core")
    applied: PatchReport | None = getattr(core, MARKER, None)
    if applied is None:
        applied = apply_patches(PATCHES)
        setattr(core, MARKER, applied)
    return applied
