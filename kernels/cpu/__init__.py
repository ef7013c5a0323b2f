"""Kernels for CPUs: numba with the vector and matrix instructions that a machine has."""

from whalepod.kernels.cpu.backend import CpuKernels

__all__ = ["CpuKernels"]
