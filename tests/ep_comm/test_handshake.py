"""Ranks that were started differently learn what differs, instead of waiting for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.ep_comm.groups import run_faulty, run_loopback
from tests.ep_comm.test_by_expert import make_config
from whalepod.ep_comm import handshake
from whalepod.ep_comm.config import reserve
from whalepod.ep_comm.group import CallFailed, Group
from whalepod.ep_comm.handshake import HandshakeError, describe, shake_hands
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup, results_of

CONFIG = make_config(4)


def shake(transport: Transport, max_tokens: int) -> None:
    heap = HeapLayout(4)
    regions = handshake.reserve(heap)
    config = replace(CONFIG, max_tokens=max_tokens)
    reserve(heap, config, "exchange")
    described = describe(low_latency=config, heap=heap.digest())
    shake_hands(Group(transport), regions, described, timeout_ms=100.0)


def largest_heap() -> HeapLayout:
    heap = HeapLayout(4)
    handshake.reserve(heap)
    return heap


def test_equal_settings_pass() -> None:
    run_loopback(largest_heap(), lambda transport: shake(transport, 6))
    results_of(run_faulty(largest_heap(), lambda transport: shake(transport, 6), seed=1))


def test_a_difference_names_the_field_the_values_and_the_ranks_on_every_rank() -> None:
    def program(transport: Transport) -> None:
        with pytest.raises(HandshakeError) as caught:
            shake(transport, 8 if transport.rank == 2 else 6)
        message = str(caught.value)
        assert "low_latency.max_tokens: 6 on ranks [0, 1, 3]; 8 on ranks [2]" in message
        assert "heap: " in message
        assert "hidden" not in message

    run_loopback(largest_heap(), program)


def test_a_field_that_only_some_versions_have_is_named() -> None:
    def program(transport: Transport) -> None:
        extra = {"new_field": 1} if transport.rank == 0 else {}
        heap = HeapLayout(2)
        regions = handshake.reserve(heap)
        with pytest.raises(HandshakeError, match=r"new_field: 1 on ranks \[0\]; \(absent\)"):
            shake_hands(Group(transport), regions, describe(**extra), timeout_ms=100.0)

    heap = HeapLayout(2)
    handshake.reserve(heap)
    run_loopback(heap, program)


def test_a_rank_that_does_not_come_is_named() -> None:
    def program(transport: Transport) -> None:
        if transport.rank != 3:
            with pytest.raises(CallFailed, match=r"handshake of epoch 1: late: ranks \[3\]"):
                shake(transport, 6)

    results_of(LoopbackGroup(4, largest_heap().num_bytes).run(program))


def test_the_heap_digest_tells_layouts_apart() -> None:
    first, second = HeapLayout(2), HeapLayout(2)
    first.take("rows", 100)
    second.take("rows", 101)
    assert first.digest() != second.digest()
    with pytest.raises(ValueError, match="already has a region 'rows'"):
        first.take("rows", 1)
