"""The requests that wait for their grammars to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait

from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import Constraint
from whalepod.scheduler.request import Request
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.structured.interface import Matcher

MAX_COMPILING = 256
"""Requests that wait for their grammars."""
COMPILE_POLL_S = 0.01
"""How long a loop without other work waits for a grammar before it looks at its messages."""


class GrammarQueue:
    """Keeps requests in the order of their arrival.

    store  compiles their grammars; None: requests with one are refused
    """

    def __init__(self, store: GrammarStore | None) -> None:
        self._store = store
        self._waiting: dict[str, tuple[Request, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the requests."""
        return iter(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def add(self, request: Request, constraint: Constraint) -> None:
        """Keep a request until its grammar is compiled. Raises RequestRejected."""
        if self._store is None:
            raise RequestRejected("invalid_request", "this model has no tokenizer for grammars")
        if len(self._waiting) >= MAX_COMPILING:
            message = f"{len(self._waiting)} grammars wait to be compiled"
            raise RequestRejected("queue_full", message)
        self._waiting[request.request_id] = (request, self._store.matcher(constraint))

    def discard(self, request_id: str) -> None:
        """Forget a request, if it waits here."""
        self._waiting.pop(request_id, None)

    def take_ready(self) -> list[tuple[Request, Future[Matcher]]]:
        """Return, and keep no longer, the requests whose grammars are compiled or refused."""
        ready = [(request, future) for request, future in self._waiting.values() if future.done()]
        for request, _ in ready:
            del self._waiting[request.request_id]
        return ready

    def wait(self) -> None:
        """Wait a moment for one of the grammars."""
        wait([future for _, future in self._waiting.values()], timeout=COMPILE_POLL_S)

    def close(self) -> None:
        """End the thread that compiles."""
        if self._store is not None:
            self._store.close()
