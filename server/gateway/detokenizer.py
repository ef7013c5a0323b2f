"""Turns tokens into text one at a time, never emitting half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class IncrementalDetokenizer:
    """Decode a growing sequence of byte-level tokens; each token costs O(its bytes).

    The pieces that `push` and `flush` return add up to the decoding of the whole sequence. Bytes
    that begin a character wait for the rest of it; bytes that can never be part of one become
    U+FFFD, as in a full decode.
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is incomplete."""
        if token_id in self._skipped_ids or token_id >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """Return what an unfinished character decodes to: U+FFFD, or "" when there is none."""
        return self._decoder.decode(b"", final=True)
