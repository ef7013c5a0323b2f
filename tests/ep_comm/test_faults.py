"""A rank that dies at any point is named by the others, who go on without it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ep_comm import test_by_expert as expert_case, test_by_token as token_case
from tests.ep_comm.faulty import FaultPlan, FaultyTransport, RankDropped
from tests.ep_comm.groups import Inputs, run_faulty, run_loopback
from tests.equality import assert_same_bits
from whalepod.ep_comm import all_gather, config as configs
from whalepod.ep_comm.all_gather import AllGather, GatherRegions
from whalepod.ep_comm.config import ExchangeConfig
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import Arrivals, CallStatus, Expected, Group, signal_value
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup

TIMEOUT_MS, COMBINE_MS, GATHER_MS = 100.0, 200.0, 1000.0
NUM_ROUNDS = 3

Rounds = list[list[CallStatus]]


def reliable(transport: Transport) -> Transport:
    """Return the transport under a faulty one: who stays is agreed upon outside of the modes."""
    return transport._inner if isinstance(transport, FaultyTransport) else transport


def synchronise(group: Group, gather: AllGather, timeout_ms: float = GATHER_MS) -> set[int]:
    """Do what the gather of a step does; return the ranks that came.

    The second time nobody waits for a dead rank any more, so that all go on at one moment.
    """
    for _ in range(2):
        records, _ = gather.gather(torch.zeros(1, dtype=torch.int64), group.deadline(timeout_ms))
    group.mask(set(range(group.num_ranks)) - set(records))
    return set(records)


def check_names(statuses: list[CallStatus], dead: int) -> None:
    """Every call that did not end well names the dead rank, and no other rank is suspect."""
    for status in statuses:
        assert set(status.late) <= {dead}, statuses
        assert status.overtaken == (), statuses
        assert status.ok or dead in status.missing, statuses


def check_rounds(results: list[Rounds | Exception], dead: int, *, is_one_node: bool) -> None:
    """Check that survivors name `dead` and go on without it in the rounds that follow.

    With several nodes a rank may first suspect the one that forwards for the dead one; then some
    survivor names the dead one in the same round, and the gather clears the other.
    """
    survivors = []
    for found in results:
        assert isinstance(found, list), found
        survivors.append(found)
        if is_one_node:
            check_names([status for statuses in found for status in statuses], dead)
    has_failed = False
    for round_of_all in zip(*survivors, strict=True):
        statuses = [status for one in round_of_all for status in one]
        if has_failed:
            assert all(status.masked == (dead,) for status in statuses), statuses
            assert not any(status.must_stop for status in statuses), statuses
        has_failed = has_failed or any(status.must_stop for status in statuses)
        if any(not status.ok for status in statuses):
            assert any(dead in status.missing for status in statuses), statuses


def sum_without(inputs: Inputs, config: ExchangeConfig, missing: tuple[int, ...]) -> Tensor:
    """Return the sum over the experts of the ranks that are not missing."""
    is_gone_TK = torch.isin(inputs.ids_TK // config.num_local, torch.tensor(missing))
    kept_TK = inputs.ids_TK.masked_fill((inputs.ids_TK >= 0) & is_gone_TK, -1)
    return expert_case.expected_sum(replace(inputs, ids_TK=kept_TK), config)


def expert_rounds(
    transport: Transport,
    program: expert_case.Round,
    gather_regions: GatherRegions,
) -> list[CallStatus]:
    config, rank = program.config, transport.rank
    group = Group(transport)
    mode = ExpertExchange(group, config, program.regions, poison_unused=True)
    control = Group(reliable(transport))
    gather = AllGather(control, gather_regions, "gather")
    statuses = []
    for seed in range(NUM_ROUNDS):
        mine = program.inputs(seed)[rank]
        result = mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
        statuses.append(result.status)
        if not result.status.late:
            y = expert_case.scale_by_expert(result, config, rank)
            y_TH, status = mode.combine(y, result.handle, COMBINE_MS)
            statuses.append(status)
            assert_same_bits(sum_without(mine, config, status.missing), y_TH)
        mode.abort()
        transport.quiet()
        group.mask(set(range(group.num_ranks)) - synchronise(control, gather))
        mode.resume(100 * (seed + 1))
    return statuses


@pytest.mark.parametrize("dead", [0, 2])
def test_by_expert_survivors_name_a_rank_wherever_it_dies(dead: int) -> None:
    config = expert_case.make_config(3, num_experts=12)
    heap, regions = expert_case.make_heap(config)
    gather_regions = all_gather.reserve(heap, 8, "gather")
    program = expert_case.Round(config, regions, ())

    def run(transport: Transport) -> list[CallStatus]:
        return expert_rounds(transport, program, gather_regions)

    alive = 0
    for num_operations in range(0, 200, 5):
        plan = FaultPlan(drops={dead: num_operations}, max_delay=5)
        results = run_faulty(heap, run, seed=num_operations, plan=plan)
        if not isinstance(results[dead], RankDropped):
            break
        alive += 1
        for rank, statuses in enumerate(results):
            if rank == dead:
                continue
            assert isinstance(statuses, list), statuses
            check_names(statuses, dead)
    assert alive > 8, "the rank should have died at many places"


def token_rounds(
    transport: Transport,
    program: token_case.Round,
    gather_regions: GatherRegions,
) -> Rounds:
    config, rank = program.config, transport.rank
    group = Group(transport)
    mode = ExpertExchange(group, config, program.regions)
    control = Group(reliable(transport))
    gather = AllGather(control, gather_regions, "gather")
    rounds: Rounds = []
    for seed in range(NUM_ROUNDS):
        mine = program.inputs(seed)[rank]
        received = mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, TIMEOUT_MS)
        statuses = [received.status]
        if not received.status.must_stop:
            y_NH = token_case.computed(received.rows, rank, config)
            _, status = mode.combine(y_NH, received.handle, COMBINE_MS)
            statuses.append(status)
        rounds.append(statuses)
        mode.abort()
        transport.quiet()
        group.mask(set(range(group.num_ranks)) - synchronise(control, gather))
        mode.resume(100 * (seed + 1))
    return rounds


@pytest.mark.parametrize("ranks_per_node", [2, 4])
def test_per_token_survivors_name_a_rank_wherever_it_dies(ranks_per_node: int) -> None:
    dead = 1
    config = token_case.make_config(4, ranks_per_node)
    heap, regions = token_case.make_heap(config)
    gather_regions = all_gather.reserve(heap, 8, "gather")
    program = token_case.Round(config, regions, ())

    def run(transport: Transport) -> Rounds:
        return token_rounds(transport, program, gather_regions)

    alive = 0
    for num_operations in range(0, 600, 41):
        plan = FaultPlan(drops={dead: num_operations}, max_delay=5)
        results = run_faulty(
            heap, run, seed=num_operations, plan=plan, ranks_per_node=ranks_per_node
        )
        if not isinstance(results[dead], RankDropped):
            break
        alive += 1
        survivors = [found for rank, found in enumerate(results) if rank != dead]
        check_rounds(survivors, dead, is_one_node=ranks_per_node == 4)
    assert alive > 8, "the rank should have died at many places"


@pytest.mark.parametrize("mode_name", ["low_latency", "throughput"])
def test_an_abort_is_heard_long_before_the_deadline(mode_name: str) -> None:
    fast = expert_case.make_config(3, num_experts=12)
    bulk = token_case.make_config(3, 3, num_experts=12)
    heap, fast_regions = expert_case.make_heap(fast)
    bulk_regions = configs.reserve(heap, bulk, "bulk")
    gather_regions = all_gather.reserve(heap, 8, "gather")

    def program(transport: Transport) -> None:
        group = Group(transport)
        config, regions = (
            (fast, fast_regions) if mode_name == "low_latency" else (bulk, bulk_regions)
        )
        mode = ExpertExchange(group, config, regions)
        gather = AllGather(group, gather_regions, "gather")
        ids_TK, weights_TK = torch.tensor([[0, 5, 9, -1]]), torch.ones(1, 4)
        x_TH = torch.ones(1, fast.hidden)

        def dispatch() -> CallStatus:
            result = mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
            mode.abort()
            return result.status

        if transport.rank == 1:
            mode.abort()
        else:
            status = dispatch()
            assert status.aborted, status
            assert status.late == (), status
            assert not group.suspects
        assert synchronise(group, gather) == {0, 1, 2}
        assert transport.now_ms() < TIMEOUT_MS
        mode.resume(10)
        assert dispatch().ok

    run_loopback(heap, program)


def test_a_rank_that_was_only_slow_is_let_in_again() -> None:
    config = expert_case.make_config(2)
    heap, regions = expert_case.make_heap(config)
    gather_regions, idle = all_gather.reserve(heap, 8, "gather"), heap.take_signals("idle", 1)

    def run(transport: Transport) -> None:
        group = Group(transport)
        mode = ExpertExchange(group, config, regions, poison_unused=True)
        gather = AllGather(group, gather_regions, "gather")
        x_TH, ids_TK = torch.ones(1, config.hidden), torch.tensor([[0, 15, -1, -1]])
        weights_TK = torch.ones(1, 4)
        if transport.rank == 0:
            first = mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
            assert first.status.late == (1,)
            assert int(first.count_E[0]) == 1, "its own rows are there"
            mode.abort()
            second = mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
            assert second.status.masked == (1,)
            assert transport.now_ms() == TIMEOUT_MS, "nobody waits for a suspect rank"
            mode.abort()
        else:
            transport.signal_wait(idle.signal(0), 1, 4 * TIMEOUT_MS)
            result = mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
            assert result.status.ok
            _, status = mode.combine(result.rows, result.handle, COMBINE_MS)
            assert (status.aborted, status.blamed) == ((0,), (1,)), "it hears that it is late"
            assert transport.now_ms() == 4 * TIMEOUT_MS, "and waits for nobody"
        group.mask(())
        assert synchronise(group, gather) == {0, 1}
        mode.resume(10)
        assert mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS).status.ok

    run_loopback(heap, run)


def test_a_rank_finds_out_that_the_others_went_on_without_it() -> None:
    heap = HeapLayout(1)
    words = heap.take_signals("words", 1)
    [transport] = LoopbackGroup(1, heap.num_bytes).transports
    group = Group(transport)
    expected = [Expected(0, words.signal(0), 0)]

    transport.signal_op(words.signal(0), signal_value(7, 3), 0)
    arrivals = Arrivals(group, "dispatch", 5)
    assert arrivals.wait(expected, 1.0) == {}
    assert str(arrivals.status()) == "dispatch of epoch 5: overtaken: ranks [0]"

    arrivals = Arrivals(group, "dispatch", 7)
    assert arrivals.wait(expected, 1.0) == {0: 3}
    transport.signal_op(words.signal(0), signal_value(9, 0), 0)
    arrivals.check_unchanged()
    assert arrivals.status().overtaken == (0,), "what was read may be torn"


def test_waiting_times_point_at_the_slow_rank() -> None:
    config = expert_case.make_config(3, num_experts=12)
    heap, regions = expert_case.make_heap(config)
    idle = heap.take_signals("idle", 1)

    def run(transport: Transport) -> list[float]:
        group = Group(transport)
        mode = ExpertExchange(group, config, regions)
        if transport.rank == 1:
            transport.signal_wait(idle.signal(0), 1, 70.0)
        x_TH, ids_TK = torch.ones(0, config.hidden), torch.zeros(0, 4, dtype=torch.int64)
        weights_TK = torch.ones(0, 4)
        assert mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS).status.ok
        waited_ms: list[float] = group.wait_ms_R.tolist()
        return waited_ms

    assert run_loopback(heap, run) == [[0, 70, 0], [0, 0, 0], [0, 70, 0]]


def test_the_faulty_transport_counts_what_no_quiet_completed() -> None:
    config = expert_case.make_config(2)
    heap, _ = expert_case.make_heap(config)

    def run(transport: Transport) -> None:
        assert isinstance(transport, FaultyTransport)
        transport.put_nbi(512, torch.ones(64, dtype=torch.uint8), 1)
        assert transport.num_pending > 0
        transport.quiet()
        assert transport.num_pending == 0

    assert run_faulty(heap, run, seed=0) == [None, None]


def test_a_rank_that_others_blame_is_not_missing_by_that() -> None:
    """It came late for them; here, in its own process or in a quicker one, its rows were added."""
    status = CallStatus(operation="combine", epoch=2, aborted=(0, 2), blamed=(1,))
    assert status.missing == (0, 2)
    assert status.must_stop
    assert not status.ok
