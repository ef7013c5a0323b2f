"""The frames of a server-sent event stream."""

from __future__ import annotations

import orjson

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


def named_frame(event: str, data: object) -> bytes:
    """Return `data` as one event that also has a name."""
    return b"event: " + event.encode() + b"\n" + frame(data)


def frame(data: object) -> bytes:
    """Return `data` as one event; JSON never holds a raw line break, so one line is enough."""
    return b"data: " + orjson.dumps(data) + b"\n\n"
