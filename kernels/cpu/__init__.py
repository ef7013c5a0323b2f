"""Kernels for CPUs: numba where call overhead dominates, oneDNN through torch where GEMMs do."""
