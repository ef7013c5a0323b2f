"""The engine inside the caller's own process, without HTTP: `whalepod.Engine`."""

from __future__ import annotations


class Engine:
    """Generate text with a model, from Python."""
