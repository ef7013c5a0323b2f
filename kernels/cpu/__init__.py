"""Kernels for CPUs: numba where call overhead dominates, oneDNN through torch where GEMMs do."""

from whalepod.kernels.cpu.backend import INVARIANT_LIMITS, CpuKernels

__all__ = ["INVARIANT_LIMITS", "CpuKernels"]
