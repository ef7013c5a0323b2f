"""Finds stop strings in text that arrives in pieces, holding back only a possible beginning."""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.server.gateway.chat_formats.interface import STRUCTURE


class StopMatcher:
    """Knuth-Morris-Pratt over all stop strings at once: the same match for every cut of the text.

    The stop string that is complete first wins; of two that end together, the longer one.
    `STRUCTURE` is no character of the text.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._failures = [_failure_function(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._include_stop = include_stop
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to deliver, and the stop string that it ended at."""
        for i, character in enumerate(text):
            stop = self._advance(character)
            if stop is not None:
                return self._cut(self._held + text[: i + 1], stop), stop
        text = self._held + text
        safe = _before_last(text, max(self._matched))
        self._held = text[safe:]
        return text[:safe], None

    def flush(self) -> str:
        """Return the held text: the answer ended and it was no stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str) -> str | None:
        if character == STRUCTURE:
            return None
        for k, stop in enumerate(self._stops):
            matched = self._matched[k]
            while matched and stop[matched] != character:
                matched = self._failures[k][matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                return stop
            self._matched[k] = matched
        return None

    def _cut(self, text: str, stop: str) -> str:
        self._held = ""
        return text if self._include_stop else text[: _before_last(text, len(stop))]


def _before_last(text: str, num_chars: int) -> int:
    """Return where the last characters of a text begin, the sign of a marker included."""
    position = len(text)
    while num_chars:
        position -= 1
        num_chars -= text[position] != STRUCTURE
    is_marked = 0 < position < len(text) and text[position - 1] == STRUCTURE
    return position - is_marked


def _failure_function(pattern: str) -> list[int]:
    """For each prefix: the length of its longest proper prefix that is also its suffix."""
    failure = [0] * len(pattern)
    for i in range(1, len(pattern)):
        matched = failure[i - 1]
        while matched and pattern[i] != pattern[matched]:
            matched = failure[matched - 1]
        failure[i] = matched + (pattern[i] == pattern[matched])
    return failure
