"""Kernels for CPUs: numba with the vector and matrix instructions that a machine has."""

from whalepod.kernels.cpu.backend import CpuKernels
from whalepod.kernels.cpu.int8_backend import Int8CpuKernels

__all__ = ["CpuKernels", "Int8CpuKernels"]
