"""Keeps texts to their grammars: which tokens may come at a position, drafts included."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from whalepod.scheduler.params import Constraint
from whalepod.server.structured.interface import Compiler, GrammarError, Matcher

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_BYTES = 256 * 1024 * 1024
GRAMMAR_BYTES, BYTES_PER_CHARACTER = 64 * 1024, 128
"""About what a compiled grammar takes, and each character of its text: 80 KB took 10 MiB."""
NOT_OPEN = -1
"""The length of a reasoning that the model may still begin."""

logger = logging.getLogger(__name__)


class GrammarState:
    """Where the text of one sequence is in its grammar; its owner is the sampling state."""

    def __init__(
        self,
        matcher: Matcher,
        constraint: Constraint,
        *,
        num_prompt_tokens: int,
        vocab_size: int,
        stop_token_ids: Collection[int],
    ) -> None:
        """`stop_token_ids` end a text; until the grammar has begun it must not end."""
        self._matcher = matcher
        self._starts_after = constraint.starts_after
        self._has_begun = constraint.starts_after is None
        self._num_seen = num_prompt_tokens
        self._stops_V = np.zeros(vocab_size, np.bool_)
        self._stops_V[list(stop_token_ids)] = True
        self._before_V: NDArray[np.bool_] | None = None  # before the beginning: None, any
        if constraint.banned_before or not constraint.is_optional:
            self._before_V = np.full(vocab_size, True)
            self._before_V[list(constraint.banned_before)] = False
            if not constraint.is_optional:
                self._before_V &= ~self._stops_V
        self._reasoning_start = constraint.reasoning_start
        self._reasoning_ends = constraint.reasoning_ends
        self._max_reasoning = constraint.max_reasoning_tokens or 0
        self._num_reasoning: int | None = None  # None: without a bound, or over
        if constraint.max_reasoning_tokens is not None:
            self._num_reasoning = 0 if constraint.reasoning_start is None else NOT_OPEN
        self._only_end_V = np.zeros(vocab_size, np.bool_)
        self._only_end_V[list(constraint.reasoning_ends[:1])] = True

    def observe(self, start: int, token_ids: Sequence[int]) -> None:
        """Take the tokens of a row that starts at position `start`, each position once."""
        for token_id in token_ids[max(self._num_seen - start, 0) :]:
            if not self._has_begun:
                self._has_begun = token_id == self._starts_after
                self._num_reasoning = self._reasoning_with(self._num_reasoning, token_id)
            elif not self._stops_V[token_id]:
                self._matcher.consume(token_id)
        self._num_seen = max(self._num_seen, start + len(token_ids))

    def allowed(self, before: Sequence[int] = ()) -> NDArray[np.bool_] | None:
        """Return which tokens may follow `before`, which follows what was observed: `[V]`.

        None: any. After a draft that the grammar forbids the choice is not looked at.
        """
        begun = self._has_begun
        # a copy, not a rollback: llguidance 1.9 forgot states after some rollbacks, and then
        # allowed `["color": ` in a list
        matcher = self._matcher.copy() if before else self._matcher
        num_reasoning = self._num_reasoning
        for token_id in before:
            if not begun:
                begun = token_id == self._starts_after
                num_reasoning = self._reasoning_with(num_reasoning, token_id)
            elif self._stops_V[token_id]:
                # with ignore_eos the text goes on after it, and `observe` skips it, too
                if not self._allowed_next(matcher)[token_id]:
                    return None
            elif not matcher.consume(token_id):
                return None
        if begun:
            return self._allowed_next(matcher)
        is_spent = num_reasoning is not None and num_reasoning >= self._max_reasoning
        return self._only_end_V if is_spent else self._before_V

    def _reasoning_with(self, num_tokens: int | None, token_id: int) -> int | None:
        """Return the length of the reasoning with one more token of the text."""
        if num_tokens is None or token_id in self._reasoning_ends:
            return None
        if num_tokens == NOT_OPEN:
            return 0 if token_id == self._reasoning_start else NOT_OPEN
        return num_tokens + 1

    def _allowed_next(self, matcher: Matcher) -> NDArray[np.bool_]:
        try:
            return matcher.allowed()
        except GrammarError as error:
            logger.error("a grammar became too complex; its text ends here: %s", error)
            return self._stops_V


class GrammarStore:
    """Compiles grammars on a thread and keeps the newest ones."""

    def __init__(self, load_compiler: Callable[[], Compiler]) -> None:
        """`load_compiler` runs on the thread, at once: reading a vocabulary takes a while."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="whalepod-grammar")
        self._compiler = self._thread.submit(load_compiler)
        self._matchers: OrderedDict[tuple[str, str], Future[Matcher]] = OrderedDict()
        self._num_bytes = 0

    def matcher(self, constraint: Constraint) -> Future[Matcher]:
        """Return the grammar's matcher, to be copied, or a GrammarError, when it is ready."""
        key = (constraint.kind, constraint.grammar)
        if key not in self._matchers:
            self._matchers[key] = self._thread.submit(self._compile, constraint)
            self._num_bytes += _size(constraint.grammar)
        self._matchers.move_to_end(key)
        while len(self._matchers) > 1 and (
            len(self._matchers) > MAX_CACHED_GRAMMARS or self._num_bytes > MAX_CACHED_BYTES
        ):
            (_, grammar), _ = self._matchers.popitem(last=False)
            self._num_bytes -= _size(grammar)
        return self._matchers[key]

    def _compile(self, constraint: Constraint) -> Matcher:
        try:
            return self._compiler.result().compile(constraint)
        except GrammarError:
            raise
        except Exception as error:  # it ends this request, not the engine
            logger.exception("a grammar cannot be compiled")
            raise GrammarError("the grammar compiler failed; the server's log says why") from error

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _size(grammar: str) -> int:
    """Return about how many bytes a compiled grammar takes."""
    return GRAMMAR_BYTES + BYTES_PER_CHARACTER * len(grammar)
