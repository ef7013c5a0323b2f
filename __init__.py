"""whalepod serves DeepSeek-V3-style models behind an OpenAI-compatible API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from whalepod.scheduler.params import SamplingParams
    from whalepod.server.engine.local import Engine

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import the public classes on first use: `whalepod --version` must not load torch."""
    if name == "Engine":
        from whalepod.server.engine.local import Engine

        return Engine
    if name == "SamplingParams":
        from whalepod.scheduler.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'whalepod' has no attribute {name!r}")
