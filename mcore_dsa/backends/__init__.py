"""Implementations of compression, selection and attention behind one protocol."""

from mcore_dsa.backends.choice import Choice, Target, choose, resolve
from mcore_dsa.backends.protocol import AttentionCall, Backend, SelectionCounters

__all__ = ["AttentionCall", "Backend", "Choice", "SelectionCounters", "Target", "choose", "resolve"]
