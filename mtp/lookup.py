"""Drafts without a model: what followed the last few tokens when they stood in the text before.

Good where answers copy: code edits, retrieval, tables. (Prompt lookup decoding, Saxena 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence

RUN_LENGTHS = (3, 2)
"""Tokens that must have been seen before, longest first: longer runs err less, shorter hit more."""


class TextLookup:
    """The text of one sequence, and where each short run of tokens in it was last followed."""

    __slots__ = ("_next_of_run", "_token_ids")

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._token_ids: list[int] = []
        self._next_of_run: dict[tuple[int, ...], int] = {}
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the text's next tokens."""
        text = self._token_ids
        for token_id in token_ids:
            end = len(text)
            for length in RUN_LENGTHS:
                if end >= length:
                    self._next_of_run[tuple(text[end - length :])] = end
            text.append(token_id)

    def guess(self, new_token_ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """Return at most `num_tokens` that may follow the text and `new_token_ids` after it; none
        where the last tokens are new. A run that reaches the end of the text is taken to repeat.
        """
        longest = RUN_LENGTHS[0]
        ending = [*self._token_ids[max(len(self._token_ids) - longest, 0) :], *new_token_ids]
        for length in RUN_LENGTHS:
            start = self._next_of_run.get(tuple(ending[-length:]))
            if start is not None and len(ending) >= length:
                return self._copy_from(start, new_token_ids, num_tokens)
        return ()

    def _copy_from(
        self, start: int, new_token_ids: Sequence[int], num_tokens: int
    ) -> tuple[int, ...]:
        copied = [*self._token_ids[start : start + num_tokens]]
        if len(copied) < num_tokens:  # the end of the text is near: go on with what is new
            source = [*self._token_ids[start:], *new_token_ids]
            while len(source) < num_tokens:
                source += source
            copied = source[:num_tokens]
        return tuple(copied)
