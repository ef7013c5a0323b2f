"""The requests that wait for their grammars to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, wait

from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.refusals import rejected
from whalepod.server.messages import Rejected, Submit
from whalepod.server.structured.interface import Matcher

MAX_COMPILING = 256
"""Requests that wait for their grammars."""
COMPILE_POLL_S = 0.01
"""How long a loop without other work waits for a grammar before it looks at its messages."""


class Compiling:
    """Keeps requests, in the order of their arrival, until their grammars are ready."""

    def __init__(self, grammars: GrammarStore | None) -> None:
        """`grammars` compiles; None: requests that need it are refused."""
        self._grammars = grammars
        self._waiting: dict[str, tuple[Submit, Future[Matcher]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the ids of the requests."""
        return iter(self._waiting)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._waiting

    def take(self, submit: Submit) -> Rejected | Future[Matcher] | None:
        """Return a request's matcher if it is ready already; None: the request is kept."""
        constraint = submit.params.constraint
        assert constraint is not None, "a request without a grammar has nothing to wait for"
        if self._grammars is None:
            return rejected(submit, "invalid_request", "this model has no tokenizer for grammars")
        if len(self._waiting) >= MAX_COMPILING:
            return rejected(submit, "queue_full", f"{MAX_COMPILING} grammars wait to be compiled")
        matcher = self._grammars.matcher(constraint)
        if matcher.done():
            return matcher
        self._waiting[submit.request_id] = (submit, matcher)
        return None

    def take_ready(self) -> list[tuple[Submit, Future[Matcher]]]:
        """Return, and keep no longer, the requests whose grammars are compiled or refused."""
        ready = [(submit, matcher) for submit, matcher in self._waiting.values() if matcher.done()]
        for submit, _ in ready:
            del self._waiting[submit.request_id]
        return ready

    def discard(self, request_id: str) -> None:
        """Forget a request, if it waits here."""
        self._waiting.pop(request_id, None)

    def wait(self) -> None:
        """Wait a moment for one of the grammars."""
        matchers = [matcher for _, matcher in self._waiting.values()]
        wait(matchers, timeout=COMPILE_POLL_S)

    def close(self) -> None:
        """End the thread that compiles."""
        if self._grammars is not None:
            self._grammars.close()
