"""Stored responses: bounded, and each key sees its own only."""

from __future__ import annotations

from whalepod.server.gateway.response_store import ResponseStore, StoredResponse


def stored(response_id: str, text: str = "") -> StoredResponse:
    return StoredResponse(
        response={"id": response_id, "output": [{"text": text}]}, input_items=[], earlier_items=[]
    )


def test_the_oldest_leaves_when_there_are_too_many() -> None:
    store = ResponseStore(max_entries=2, max_bytes=10_000)
    for name in "abc":
        store.put(None, stored(name))

    assert [store.get(None, name) is not None for name in "abc"] == [False, True, True]
    assert len(store) == 2


def test_the_oldest_leave_when_there_are_too_many_bytes() -> None:
    store = ResponseStore(max_entries=100, max_bytes=1000)
    for name in "abc":
        store.put(None, stored(name, "x" * 400))
        assert store.num_bytes <= 1000

    assert [store.get(None, name) is not None for name in "abc"] == [False, True, True]
    store.put(None, stored("large", "x" * 1000))
    assert store.get(None, "large") is None
    assert len(store) == 2


def test_bytes_are_counted_down_to_zero() -> None:
    store = ResponseStore(max_entries=100, max_bytes=1000)
    for text in ("short", "longer" * 9):
        store.put("key", stored("a", text))

    assert len(store) == 1
    assert store.delete("key", "a")
    assert not store.delete("key", "a")
    assert store.num_bytes == 0


def test_each_key_sees_its_own_responses_only() -> None:
    store = ResponseStore(max_entries=100, max_bytes=1000)
    store.put("one", stored("a"))

    assert store.get("one", "a") == stored("a")
    assert store.get("two", "a") is None
    assert store.get(None, "a") is None
    assert not store.delete("two", "a")
