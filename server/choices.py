"""The choices between backends: which kernels, which transport, and what drafts tokens.

Grammars have one library (`structured/llguidance_backend.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from whalepod.mtp.config import SpeculationConfig
from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.errors import StartupError

if TYPE_CHECKING:  # launchers choose a transport, and load no torch for it
    import torch

    from whalepod.kernels.interface import Kernels
    from whalepod.models.config import ModelConfig


def choose_kernels(config: EngineConfig, dtype: torch.dtype) -> Kernels:
    """Return the operations of the device, compiled. Raises StartupError."""
    # a backend is imported only where it is chosen
    from whalepod.models.source import compiled_code_folder
    from whalepod.server.progress import reporter

    device, is_int8 = config.device, config.source.quantization == "int8"
    if device.device != "cpu":
        raise StartupError(f"device {device.device!r} is not supported yet: use --device cpu")
    if device.kernels == "reference":
        from whalepod.kernels.reference import ReferenceKernels
        from whalepod.kernels.reference_int8 import Int8ReferenceKernels

        return Int8ReferenceKernels() if is_int8 else ReferenceKernels()
    from whalepod.kernels.cpu import CpuKernels

    kernels = CpuKernels(
        num_threads=device.num_threads or None,
        is_invariant=device.batch_invariant,
        is_int8=is_int8,
        code_folder=compiled_code_folder(),
    )
    kernels.warm_up(dtype, reporter("compiling kernels (once)", "kernels"))
    return kernels


def choose_transport(config: EngineConfig, *, num_launchers: int) -> TransportName:
    """Return what carries rows between the ranks (`--all2all-backend`). Raises StartupError.

    num_launchers  1: one launcher starts all ranks, on one machine, so they inherit its memory
    """
    has_gpus, wanted = config.device.device == "cuda", config.parallel.all2all_backend
    if wanted == "auto":
        if num_launchers == 1:
            return "cuda_ipc" if has_gpus else "shm"
        return "nvshmem" if has_gpus else "gloo"
    if wanted in ("shm", "cuda_ipc") and num_launchers > 1:
        raise StartupError(
            f"--all2all-backend {wanted} reaches ranks of one `whalepod serve` only, and "
            f"{num_launchers} processes start ranks: use {'nvshmem' if has_gpus else 'gloo'}"
        )
    if wanted in ("cuda_ipc", "nvshmem") and not has_gpus:
        raise StartupError(
            f"--all2all-backend {wanted} needs --device cuda: use shm, or gloo for several machines"
        )
    return wanted


def can_return(transport: TransportName) -> bool:
    """Return whether a lost rank can come back into a group that goes on."""
    return transport == "shm"


def wants_mtp(speculation: SpeculationConfig, config: ModelConfig) -> bool:
    """Return whether the model's own layer drafts. Raises StartupError if it must and is absent."""
    if speculation.is_off or speculation.speculation_method == "lookup":
        return False
    if not config.num_mtp_layers and speculation.speculation_method == "mtp":
        raise StartupError(
            "--speculation-method mtp needs a multi-token-prediction layer, and config.json has "
            "num_nextn_predict_layers = 0: use --speculation-method lookup"
        )
    return config.num_mtp_layers > 0


def wants_lookup(speculation: SpeculationConfig, *, has_mtp: bool) -> bool:
    """Return whether drafts are looked up: beside the layer's, or where they are asked for."""
    if speculation.is_off or speculation.speculation_method == "mtp":
        return False
    return has_mtp or speculation.is_explicit
