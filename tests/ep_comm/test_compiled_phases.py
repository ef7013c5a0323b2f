"""Phases of one compiled call against the same phases over the transport: bits, statuses, waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from tests.ep_comm.groups import TIMEOUT_MS, num_examples, run_loopback
from tests.ep_comm.test_by_expert import (
    HIDDEN,
    TOP_K,
    Round,
    make_config,
    make_heap,
    make_mode,
    scale_by_expert,
)
from tests.ep_comm.transports import OPENERS, close_place, make_place, run_threads
from tests.equality import assert_same_bits
from whalepod.ep_comm.config import ExchangeConfig
from whalepod.ep_comm.dispatched import Dispatched
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import CallStatus, Group
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.shm import ShmTransport

NUM_RANKS = 2
IDS_TK = torch.tensor([[0, 5, 9, 15]])
WEIGHTS_TK = torch.ones(1, TOP_K)


def facts(result: Dispatched) -> list[Tensor]:
    """Return copies of all that a dispatch says about its rows; unused ones are NaN, as bits."""
    assert result.ranges is not None
    found = [
        result.rows.view(torch.int32),
        result.info,
        result.count_E,
        result.ranges.first_row_E,
        result.ranges.ranges_ER,
    ]
    optional = [result.scales, result.ranges.expert_S]
    return [tensor.clone() for tensor in (*found, *optional) if tensor is not None]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@settings(max_examples=num_examples(quick=5))
@given(
    seed=st.integers(0, 2**31),
    skew=st.booleans(),
    layout=st.sampled_from(["packed", "per_expert"]),
    plain_ranks=st.sets(st.integers(0, 7)),
)
def test_one_call_gives_the_bits_of_the_plain_way_and_mixes_with_it(
    num_ranks: int, seed: int, skew: bool, layout: str, plain_ranks: set[int]
) -> None:
    config = make_config(num_ranks, layout=layout, combine_dtype="bfloat16")
    heap, regions = make_heap(config)
    program = Round(config, regions, (), skew)

    def run(transport: Transport, is_plain: bool) -> list[Tensor]:
        mode, found = make_mode(transport, config, regions, is_plain=is_plain), []
        for number in range(3):
            mine = program.inputs(seed + number)[transport.rank]
            result = mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
            assert result.handle.is_compiled != is_plain
            found += facts(result)
            y = scale_by_expert(result, config, transport.rank)
            y_TH, status = mode.combine(y, result.handle, TIMEOUT_MS)
            assert status.ok, status
            found += [y_TH, mode.send_buffer.sent_bytes_R.clone()]
        return found

    plain = run_loopback(heap, lambda transport: run(transport, True))
    mapped = run_loopback(heap, lambda transport: run(transport, False))
    mixed = run_loopback(heap, lambda transport: run(transport, transport.rank in plain_ranks))
    for expected, *others in zip(plain, mapped, mixed, strict=True):
        for actual in others:
            for a, b in zip(expected, actual, strict=True):
                assert_same_bits(a, b)


def test_only_heaps_that_are_mapped_are_reached_without_the_transport(tmp_path: Path) -> None:
    heap, _ = make_heap(make_config(NUM_RANKS))

    def is_mapped(transport: Transport) -> bool:
        return transport.mapped is not None

    assert run_loopback(heap, is_mapped) == [True] * NUM_RANKS
    found = {name: all(run_threads(name, heap, is_mapped, tmp_path)) for name in OPENERS}
    assert [name for name, mapped in found.items() if mapped] == ["shm"]


class LonelyRank:
    """Rank 0 of a group over shared memory; the test plays the others."""

    def __init__(self, folder: Path, num_ranks: int = NUM_RANKS) -> None:
        self.config: ExchangeConfig = make_config(num_ranks)
        heap, self.regions = make_heap(self.config)
        self.place = make_place(heap, folder)
        self.gone: set[int] = set()
        self.modes = [self._mode(rank) for rank in range(num_ranks)]

    def _mode(self, rank: int) -> ExpertExchange:
        group = Group(ShmTransport(rank, self.place.descriptors), is_gone=self.gone.__contains__)
        return ExpertExchange(group, self.config, self.regions, poison_unused=True)

    def dispatch(self, rank: int, timeout_ms: float) -> Dispatched:
        return self.modes[rank].dispatch(torch.ones(1, HIDDEN), IDS_TK, WEIGHTS_TK, timeout_ms)

    def combine(self, rank: int, result: Dispatched, timeout_ms: float) -> CallStatus:
        y = scale_by_expert(result, self.config, rank)
        return self.modes[rank].combine(y, result.handle, timeout_ms)[1]

    def close(self) -> None:
        close_place(self.place)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LonelyRank]:
    made = LonelyRank(tmp_path)
    yield made
    made.close()


def test_a_late_rank_is_named_at_the_deadline_and_its_time_counted(group: LonelyRank) -> None:
    start = time.monotonic()
    status = group.dispatch(0, 30.0).status
    assert time.monotonic() - start >= 0.03
    assert status.late == (1,)
    waited_ms_R = group.modes[0].group.wait_ms_R
    assert float(waited_ms_R[1]) >= 29.0
    assert float(waited_ms_R[0]) < 29.0


def test_a_late_combine_is_named_and_gives_the_sum_of_those_who_came(group: LonelyRank) -> None:
    group.modes[1].send_dispatch(torch.ones(1, HIDDEN), IDS_TK, WEIGHTS_TK)
    result = group.dispatch(0, TIMEOUT_MS)
    assert result.status.ok
    status = group.combine(0, result, 30.0)
    assert (status.late, status.operation) == ((1,), "combine")


def test_a_rank_that_is_gone_ends_a_wait_before_its_deadline(group: LonelyRank) -> None:
    group.gone.add(1)
    assert group.dispatch(0, TIMEOUT_MS).status.gone == (1,)


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_call_that_is_given_up_ends_a_wait_at_once(group: LonelyRank, phase: str) -> None:
    if phase == "combine":
        group.modes[1].send_dispatch(torch.ones(1, HIDDEN), IDS_TK, WEIGHTS_TK)
        result = group.dispatch(0, TIMEOUT_MS)
    heard: list[tuple[CallStatus, float]] = []

    def wait() -> None:
        if phase == "combine":
            status = group.combine(0, result, TIMEOUT_MS)
        else:
            status = group.dispatch(0, TIMEOUT_MS).status
        heard.append((status, time.monotonic()))

    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.02)  # it waits by now, in all likelihood asleep
    gave_up = time.monotonic()
    group.modes[1].abort()
    waiter.join(60)
    [(status, when)] = heard
    assert (status.aborted, status.blamed) == ((1,), (1,))
    assert 1e3 * (when - gave_up) < TIMEOUT_MS / 10, "long before the deadline"


def test_a_rank_that_came_back_is_waited_for_in_one_call_again(group: LonelyRank) -> None:
    result = group.dispatch(0, 1.0)
    assert not result.handle.is_compiled
    assert group.modes[0].group.suspects == {1}
    group.modes[0].abort()
    group.modes[0].group.mask(())
    for mode in group.modes:
        mode.resume(10)
    group.modes[1].send_dispatch(torch.ones(1, HIDDEN), IDS_TK, WEIGHTS_TK)
    result = group.dispatch(0, TIMEOUT_MS)
    assert result.status.ok
    assert result.handle.is_compiled


def test_a_rank_that_went_on_without_this_one_is_found_out(group: LonelyRank) -> None:
    group.modes[1].resume(11)  # an odd call, like this rank's first: the same words
    group.modes[1].send_dispatch(torch.ones(1, HIDDEN), IDS_TK, WEIGHTS_TK)
    status = group.dispatch(0, TIMEOUT_MS).status
    assert (status.overtaken, status.late) == ((1,), ())
