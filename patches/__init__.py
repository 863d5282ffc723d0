"""Temporary changes to the installed megatron-core; README.md beside this file says what retires each.

Importing this package imports neither Megatron nor any patch: both happen in :func:`apply`.
"""

from mcore_dsa.patches.registry import MissingSymbolError, Outcome, Patch, PatchReport, apply

__all__ = ["MissingSymbolError", "Outcome", "Patch", "PatchReport", "apply"]
