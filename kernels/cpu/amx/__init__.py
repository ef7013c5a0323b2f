"""Kernels for AMX, the matrix tiles of some x86 machines: loaded only where they are chosen."""
