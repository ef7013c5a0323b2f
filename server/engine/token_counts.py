"""How often each token of a text was generated: what penalties depend on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
FloatArray: TypeAlias = NDArray[np.float32]


class TokenCounts:
    """How often each token of a sequence was generated; prompt tokens start with zero."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        distinct = list(dict.fromkeys(prompt_token_ids))
        self._slot_of = {token_id: slot for slot, token_id in enumerate(distinct)}
        self._ids = np.array(distinct + [0] * 64, dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_seen = len(prompt_token_ids)

    @property
    def ids(self) -> IntArray:
        """Distinct tokens of prompt and answer, in order of first appearance."""
        return self._ids[: len(self._slot_of)]

    @property
    def generated(self) -> FloatArray:
        """For each of `ids`, how often the answer holds it."""
        return self._counts[: len(self._slot_of)]

    def observe(self, start: int, token_ids: Sequence[int]) -> None:
        """Count those tokens of a row that were not counted yet."""
        for token_id in token_ids[max(self._num_seen - start, 0) :]:
            slot = self._slot(token_id)  # may replace the array
            self._counts[slot] += 1
        self._num_seen = max(self._num_seen, start + len(token_ids))

    def with_tokens(self, token_ids: Sequence[int]) -> tuple[IntArray, FloatArray]:
        """Return `ids` and `generated` with more tokens, which are not kept."""
        fresh = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._slot_of]
        num_known = len(self._slot_of)
        ids = np.concatenate([self.ids, np.array(fresh, dtype=np.int64)])
        generated = np.concatenate([self.generated, np.zeros(len(fresh), dtype=np.float32)])
        slot_of_fresh = {token_id: num_known + i for i, token_id in enumerate(fresh)}
        for token_id in token_ids:
            slot = self._slot_of.get(token_id)
            generated[slot_of_fresh[token_id] if slot is None else slot] += 1
        return ids, generated

    def _slot(self, token_id: int) -> int:
        slot = self._slot_of.setdefault(token_id, len(self._slot_of))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token_id
        return slot
