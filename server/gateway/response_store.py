"""Keeps answers of the Responses API, so that later requests can go on from them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import orjson

Item: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredResponse:
    """One answer with the conversation that led to it."""

    response: Mapping[str, Any]
    """The `response` object."""
    input_items: list[Item]
    """What its own request added."""
    earlier_items: list[Item]
    """What came before, over all previous responses."""

    @property
    def conversation(self) -> list[Item]:
        """All items, the answer's included."""
        return [*self.earlier_items, *self.input_items, *self.response["output"]]


class ResponseStore:
    """Holds answers in memory, bounded by number and bytes; the oldest leave first.

    Each belongs to the key of its request: no other key finds it. An entry holds its whole
    conversation, so it does not depend on whether earlier ones are still there.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[tuple[bytes, str], bytes] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, owner: str | None, stored: StoredResponse) -> None:
        """Keep an answer; one that alone is larger than the store is not kept."""
        data = orjson.dumps([stored.response, stored.input_items, stored.earlier_items])
        if len(data) > self._max_bytes:
            return
        key = _key(owner, stored.response["id"])
        self._drop(key)
        self._entries[key] = data
        self.num_bytes += len(data)
        while len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def get(self, owner: str | None, response_id: str) -> StoredResponse | None:
        """Return an answer of `owner`; None when there is none, or no longer."""
        data = self._entries.get(_key(owner, response_id))
        if data is None:
            return None
        response, input_items, earlier_items = orjson.loads(data)
        return StoredResponse(
            response=response, input_items=input_items, earlier_items=earlier_items
        )

    def delete(self, owner: str | None, response_id: str) -> bool:
        """Forget an answer; False when there was none."""
        return self._drop(_key(owner, response_id))

    def _drop(self, key: tuple[bytes, str]) -> bool:
        data = self._entries.pop(key, None)
        self.num_bytes -= len(data or b"")
        return data is not None


def _key(owner: str | None, response_id: str) -> tuple[bytes, str]:
    """Return the place of an answer; keys of clients are not kept, only their hashes."""
    return hashlib.sha256((owner or "").encode()).digest(), response_id
