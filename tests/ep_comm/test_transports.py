"""What every transport promises, and what each adds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.ep_comm.groups import num_examples, run_faulty, run_loopback
from tests.ep_comm.test_by_expert import Round, make_config, make_heap
from tests.ep_comm.test_by_token import (
    Round as ThroughputRound,
    make_config as make_throughput_config,
    make_heap as make_throughput_heap,
)
from tests.ep_comm.transports import (
    OPENERS,
    REAL_TIMEOUT_MS,
    RUNNERS,
    run_processes,
    run_threads,
)
from whalepod.ep_comm.config import reserve
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport.interface import Topology, Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup, results_of
from whalepod.ep_comm.transport.shm import ShmTransport, create_heaps

NUM_RANKS = 3


@pytest.mark.parametrize("name", RUNNERS)
def test_data_before_a_fence_is_there_when_the_signal_is(name: str, tmp_path: Path) -> None:
    heap = HeapLayout(NUM_RANKS)
    data, words = heap.take("data", 4096 * NUM_RANKS), heap.take_signals("words", NUM_RANKS)

    def program(transport: Transport) -> None:
        me, ranks = transport.rank, range(NUM_RANKS)
        source = torch.full((4096,), me + 1, dtype=torch.uint8)
        for rank in ranks:
            transport.put_nbi(data.offset + 4096 * me, source, rank)
            transport.fence(rank)
            transport.signal_op(words.signal(me), 7, rank)
        deadline_ms = transport.now_ms() + REAL_TIMEOUT_MS
        for rank in ranks:
            assert transport.signal_wait(words.signal(rank), 7, deadline_ms) == (True, 7)
            assert bool((data.view(transport.heap)[4096 * rank :][:4096] == rank + 1).all())

    RUNNERS[name](heap, program, tmp_path)


@pytest.mark.parametrize("name", RUNNERS)
def test_barriers_hold_until_all_have_come_and_name_who_has_not(name: str, tmp_path: Path) -> None:
    heap = HeapLayout(NUM_RANKS)
    came: list[int] = []

    def program(transport: Transport) -> None:
        came.append(transport.rank)
        assert transport.barrier(transport.now_ms() + REAL_TIMEOUT_MS) == ()
        assert sorted(came[:NUM_RANKS]) == list(range(NUM_RANKS))
        if transport.rank != 2:
            assert transport.barrier(transport.now_ms() + 20.0) == (2,)

    RUNNERS[name](heap, program, tmp_path)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_wait_ends_at_its_deadline(name: str, tmp_path: Path) -> None:
    heap = HeapLayout(NUM_RANKS)
    words = heap.take_signals("words", 1)

    def program(transport: Transport) -> None:
        deadline_ms = transport.now_ms() + 20.0
        assert transport.signal_wait(words.signal(0), 1, deadline_ms) == (False, 0)
        assert transport.now_ms() >= deadline_ms

    RUNNERS[name](heap, program, tmp_path)


def test_the_loopback_clock_is_virtual() -> None:
    heap = HeapLayout(2)
    words = heap.take_signals("words", 1)
    start = time.monotonic()

    def program(transport: Transport) -> float:
        transport.signal_wait(words.signal(0), 1, transport.now_ms() + 3.6e6 * transport.rank)
        return transport.now_ms()

    assert run_loopback(heap, program)[1] == 3.6e6
    assert 1e3 * (time.monotonic() - start) < 3.6e6, "nobody waited for an hour"


def test_a_loopback_run_is_the_same_every_time_and_a_seed_changes_its_order() -> None:
    heap = HeapLayout(8)
    words = heap.take_signals("words", 8)

    def order(seed: int | None) -> list[int]:
        finished: list[int] = []

        def program(transport: Transport) -> None:
            for rank in range(8):
                transport.signal_op(words.signal(transport.rank), 1, rank)
            for rank in range(8):
                transport.signal_wait(words.signal(rank), 1, 1.0)
            finished.append(transport.rank)

        run_loopback(heap, program, seed=seed)
        return finished

    assert order(5) == order(5)
    assert len({tuple(order(seed)) for seed in range(6)}) > 1


def test_signals_overtake_data_that_no_fence_orders() -> None:
    heap = HeapLayout(2)
    data, words = heap.take("data", 4096), heap.take_signals("words", 1)

    def program(transport: Transport) -> bool:
        if transport.rank == 0:
            transport.put_nbi(data.offset, torch.ones(4096, dtype=torch.uint8), 1)
            transport.signal_op(words.signal(0), 1, 1)
            transport.signal_wait(words.signal(0), 1, 1.0)  # the other rank's turn
            transport.quiet()
            return False
        assert transport.signal_wait(words.signal(0), 1, 1000.0).arrived
        return bool((data.view(transport.heap) != 1).any())

    overtaken = [results_of(run_faulty(heap, program, seed=seed))[1] for seed in range(5)]
    assert any(overtaken)


def test_a_topology_wants_equal_nodes() -> None:
    topology = Topology(8, 4)
    assert [topology.node_of(r) for r in (0, 3, 4)] == [0, 0, 1]
    assert topology.rank_at(1, 2) == 6
    with pytest.raises(ValueError, match=r"num_ranks \(8\) must be a multiple of"):
        Topology(8, 3)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("name", OPENERS)
def test_both_modes_have_the_bits_of_plain_loops(name: str, num_ranks: int, tmp_path: Path) -> None:
    config = make_config(num_ranks)
    heap, regions = make_heap(config)
    seeds = tuple(range(num_examples(quick=5)))
    run_threads(name, heap, Round(config, regions, seeds), tmp_path)
    throughput = make_throughput_config(num_ranks, num_ranks)
    heap, throughput_regions = make_throughput_heap(throughput)
    seeds = tuple(range(num_examples(quick=2)))
    run_threads(name, heap, ThroughputRound(throughput, throughput_regions, seeds), tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", OPENERS)
def test_both_modes_between_processes(name: str, num_ranks: int, tmp_path: Path) -> None:
    config = make_config(num_ranks)
    heap, regions = make_heap(config)
    throughput = make_throughput_config(num_ranks, num_ranks)
    throughput_regions = reserve(heap, throughput, "bulk")
    before = set(os.listdir("/dev/shm"))

    def program(transport: Transport) -> None:
        Round(config, regions, tuple(range(6)))(transport)
        ThroughputRound(throughput, throughput_regions, (1, 2))(transport)

    run_processes(name, heap, program, tmp_path)
    named = [entry for entry in set(os.listdir("/dev/shm")) - before if "whalepod" in entry]
    assert named == []


def killed_process(descriptors: list[int]) -> None:
    """Send a dispatch as rank 1 and be killed before receiving."""
    torch.set_num_threads(1)
    config = make_config(2)
    _, regions = make_heap(config)
    mode = ExpertExchange(Group(ShmTransport(1, descriptors)), config, regions)
    ids_TK = torch.tensor([[0, 15, -1, -1]])
    mode.send_dispatch(torch.ones(1, config.hidden), ids_TK, torch.ones(1, 4))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.ranks
def test_a_killed_process_is_named_at_the_deadline_and_its_rows_are_whole() -> None:
    config = make_config(2)
    heap, regions = make_heap(config)
    descriptors = create_heaps(2, heap.num_bytes)
    process = multiprocessing.get_context("fork").Process(
        target=killed_process, args=(descriptors,)
    )
    process.start()
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    transport = ShmTransport(0, descriptors)
    mode = ExpertExchange(Group(transport), config, regions)
    ids_TK = torch.tensor([[0, 15, -1, -1]])
    weights_TK = torch.ones(1, 4)
    result = mode.dispatch(torch.zeros(1, config.hidden), ids_TK, weights_TK, REAL_TIMEOUT_MS)
    assert result.status.ok, "it had sent its rows"
    assert bool((result.rows[0, 1] == 1).all())
    start_ms = transport.now_ms()
    _, status = mode.combine(result.rows, result.handle, 50.0)
    assert status.late == (1,)
    assert 50.0 <= transport.now_ms() - start_ms < REAL_TIMEOUT_MS
    transport.close()
    for descriptor in descriptors:
        os.close(descriptor)


def test_a_single_rank_needs_no_run() -> None:
    [transport] = LoopbackGroup(1, 1024).transports
    assert transport.barrier(1.0) == ()
    assert not transport.signal_wait(128, 1, 5.0).arrived
    assert transport.now_ms() == 5.0
