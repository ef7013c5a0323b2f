"""Which transport a group uses: chosen once, by whoever starts its ranks."""

from __future__ import annotations

from whalepod.server.config import EngineConfig, TransportName
from whalepod.server.errors import StartupError


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
    """Say whether a rank that was lost can come back into a group that goes on."""
    return transport == "shm"
