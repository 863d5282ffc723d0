"""Implementations of compression, selection and attention behind one protocol."""

from mcore_dsa.backends.choice import Choice, Target, choose, resolve
from mcore_dsa.backends.protocol import Backend, Kept, LatentShards, SelectionCounters

__all__ = ["Backend", "Choice", "Kept", "LatentShards", "SelectionCounters", "Target", "choose", "resolve"]
