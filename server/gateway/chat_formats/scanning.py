"""Looks for delimiters in text that arrives in pieces."""

from __future__ import annotations

import re


class Delimiters:
    """Strings that end a part of the text. None may contain the first character of another."""

    def __init__(self, *delimiters: str) -> None:
        self._delimiters = delimiters
        self._pattern = re.compile("|".join(map(re.escape, delimiters)))
        self._longest = max(map(len, delimiters))

    def find(self, text: str) -> re.Match[str] | None:
        """Return the first delimiter in `text`."""
        return self._pattern.search(text)

    def num_held(self, text: str) -> int:
        """Return how many characters at the end of `text` may be the beginning of a delimiter."""
        for num_chars in range(min(self._longest - 1, len(text)), 0, -1):
            tail = text[-num_chars:]
            if any(delimiter.startswith(tail) for delimiter in self._delimiters):
                return num_chars
        return 0


class Scanner:
    """Text that was pushed and not yet taken."""

    def __init__(self) -> None:
        self.text = ""

    def push(self, text: str) -> None:
        self.text += text

    def take_until(self, delimiters: Delimiters) -> tuple[str, str | None]:
        """Take the text before the first delimiter, and the delimiter.

        Without one (None), takes all but what may be the beginning of one.
        """
        match = delimiters.find(self.text)
        if match is not None:
            before, self.text = self.text[: match.start()], self.text[match.end() :]
            return before, match.group()
        safe = len(self.text) - delimiters.num_held(self.text)
        before, self.text = self.text[:safe], self.text[safe:]
        return before, None

    def take_all(self) -> str:
        text, self.text = self.text, ""
        return text


class TrailingNewlines:
    """Holds back the newlines at the end of a text until it is known what follows them."""

    def __init__(self) -> None:
        self._num_held = 0

    def push(self, text: str) -> str:
        """Return the text that does not end in a newline so far."""
        body = text.rstrip("\n")
        if not body:
            self._num_held += len(text)
            return ""
        held, self._num_held = self._num_held, len(text) - len(body)
        return "\n" * held + body

    def take(self) -> str:
        """Return the held newlines and forget them."""
        held, self._num_held = self._num_held, 0
        return "\n" * held
