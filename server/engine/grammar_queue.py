"""The requests that wait for their grammars to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass

from whalepod.scheduler.request import Request
from whalepod.server.structured.interface import Matcher

MAX_COMPILING = 256
"""Requests that wait for their grammars."""
COMPILE_POLL_S = 0.01
"""How long a loop without other work waits for a grammar before it looks at its messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiling:
    """A request that was taken, and will be queued once its grammar is there."""

    request: Request
    matcher: Future[Matcher]


class GrammarQueue:
    """Keeps requests in the order of their arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, Compiling] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the requests."""
        return iter(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    @property
    def is_full(self) -> bool:
        return len(self._waiting) >= MAX_COMPILING

    def add(self, compiling: Compiling) -> None:
        """Keep a request."""
        self._waiting[compiling.request.request_id] = compiling

    def discard(self, request_id: str) -> None:
        """Forget a request, if it waits here."""
        self._waiting.pop(request_id, None)

    def take_ready(self) -> list[Compiling]:
        """Return, and keep no longer, the requests whose grammars are compiled or refused."""
        ready = [compiling for compiling in self._waiting.values() if compiling.matcher.done()]
        for compiling in ready:
            del self._waiting[compiling.request.request_id]
        return ready

    def wait(self) -> None:
        """Wait a moment for one of the grammars."""
        wait([compiling.matcher for compiling in self._waiting.values()], timeout=COMPILE_POLL_S)
