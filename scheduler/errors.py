"""Requests that are refused at the door, before anything is queued."""

from __future__ import annotations


class RequestRejected(Exception):
    """A request cannot be queued; `code` is machine-readable, `message` says what to change."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class QueueFull(RequestRejected):
    """Too many requests wait already; the same request may be accepted later."""

    def __init__(self, num_queued: int, limit: int) -> None:
        super().__init__(
            "queue_full",
            f"{num_queued} requests wait already and the queue holds {limit}: retry later",
        )


class TooLong(RequestRejected):
    """The request can never run on this engine, however long it waits."""
