"""Triton kernels of compression, scoring, selection and attention."""
