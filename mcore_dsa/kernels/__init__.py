"""Triton kernels of selection and attention; nothing but `tiles.py` is imported before a backend runs one of them.

Letters of shapes: `mcore_dsa/__init__.py`. What the kernels promise, how it is shown without a card, and what only a
card can show: `docs/gpu.md`.
"""
