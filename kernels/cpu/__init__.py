"""Kernels for CPUs: numba where call overhead dominates, oneDNN through torch where GEMMs do."""

from whalepod.kernels.cpu.backend import CpuKernels

__all__ = ["CpuKernels"]
