"""Keeps answers of the Responses API, so that later requests can go on from them."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.content_blocks import Block
from whalepod.server.gateway.responses_input import ResponsesRequest
from whalepod.server.gateway.responses_items import Item, resolved

_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_INPUT_ID_PREFIXES = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


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

    def size(self, owner: str | None, response_id: str) -> int:
        """Return the bytes of an answer; 0 when there is none."""
        return len(self._entries.get(_key(owner, response_id), b""))

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """The ids of a response and of its items: an item's id says where it is."""

    suffix: str
    """What is random in all of them; 32 hexadecimal digits."""

    @property
    def response(self) -> str:
        return f"resp_{self.suffix}"

    def item(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self.suffix}{block.index:04x}"

    def input_item(self, item: Item, position: int) -> str:
        """Return the id of an input item: its own, or one that no output item has."""
        prefix = _INPUT_ID_PREFIXES.get(str(item.get("type")), "msg")
        return str(item.get("id") or f"{prefix}_{self.suffix}i{position:04x}")


def place_of(item_id: str) -> tuple[str, int] | None:
    """Return the response of an output item and its place; None for an id of another kind."""
    _, _, rest = item_id.partition("_")
    suffix, index = rest[:32], rest[32:]
    is_ours = len(suffix) == 32 and 0 < len(index) <= 8 and index.isalnum() and index.isascii()
    try:
        return (Ids(suffix=suffix).response, int(index, 16)) if is_ours else None
    except ValueError:
        return None


class ResponseContext:
    """What a request goes on from among the stored responses of its key, and where it is kept."""

    def __init__(self, store: ResponseStore, body: ResponsesRequest, owner: str | None) -> None:
        self.ids = Ids(suffix=secrets.token_hex(16))
        self._store = store
        self._body = body
        self._owner = owner
        self.num_bytes = store.size(owner, body.previous_response_id or "")
        """Size of the conversation that goes on."""
        self.earlier_items = self._earlier(body.previous_response_id)
        self.items = resolved(body.input, self._find_item)

    def _earlier(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        stored = self._store.get(self._owner, response_id)
        if stored is None:
            name = "previous_response_id"
            message = f"{name}: no response {response_id[:80]!r} is stored here (any more)"
            raise ApiError("previous_response_not_found", message, name)
        return stored.conversation

    def _find_item(self, item_id: str) -> Item | None:
        """Return an item of a stored answer."""
        place = place_of(item_id)
        stored = self._store.get(self._owner, place[0]) if place else None
        output: Sequence[Item] = stored.response["output"] if stored else ()
        return next((item for item in output if item["id"] == item_id), None)

    def keep(self, response: dict[str, object]) -> None:
        """Store the finished response unless the request forbids it."""
        if self._body.store is False:
            return
        items = listed_items(self.items, self.ids)
        self._store.put(
            self._owner,
            StoredResponse(response=response, input_items=items, earlier_items=self.earlier_items),
        )


def listed_items(items: Sequence[Item], ids: Ids) -> list[Item]:
    """Return input items as they are kept and listed: each with an id, texts as parts."""
    listed = []
    for i, item in enumerate(items):
        full: dict[str, Any] = {"type": "message", **item, "id": ids.input_item(item, i)}
        if full["type"] == "message" and isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            part = {"type": kind, "text": item["content"]}
            full["content"] = [part | {"annotations": []} if kind == "output_text" else part]
        listed.append(full | {"status": item.get("status") or "completed"})
    return listed
