"""Ranks that are killed or stopped at each point of a step: the others name them and go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.ep_comm import test_low_latency as case
from tests.ep_comm.groups import make_inputs, run_loopback
from tests.ep_comm.test_faults import reliable, sum_without, synchronise
from tests.ep_comm.transports import OPENERS, Place, close_place, make_place
from tests.equality import assert_same_bits
from whalepod.ep_comm import exchange
from whalepod.ep_comm.exchange import Exchange
from whalepod.ep_comm.group import CallStatus, Group
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.transport.gloo import GlooTransport

NUM_RANKS = 3
VICTIM = 1
TIMEOUT_MS = 1_000.0
GATHER_MS = 4 * TIMEOUT_MS
"""Longer than a rank can be behind another one: it may have waited for the victim's combine."""
NUM_STEPS = 4
FATAL_STEP = 1
POINTS = ["before_send", "between_send_and_hook", "in_combine", "in_gather"]

CONFIG = case.make_config(NUM_RANKS, num_experts=12)
HEAP, REGIONS = case.make_heap(CONFIG)
GATHER_REGIONS = exchange.carve(HEAP, 8, "gather")


@dataclass(frozen=True)
class Step:
    """What a survivor reports: the statuses of a step, and how long it took."""

    statuses: list[CallStatus]
    elapsed_ms: float


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile before ranks are forked: that takes longer than their deadlines."""
    run_loopback(HEAP, case.Round(CONFIG, REGIONS, (0,)))


def run_steps(place: Place, name: str, rank: int, die: Callable[[int, str], None]) -> list[Step]:
    """Dispatch, combine and gather; `die(step, point)` may not return."""
    transport = OPENERS[name](place, rank)
    if isinstance(transport, GlooTransport):
        transport.patience_ms = TIMEOUT_MS / 3
    group = Group(transport)
    mode = LowLatency(group, CONFIG, REGIONS, poison_unused=True)
    control = Group(reliable(transport))  # who stays is agreed upon outside of the modes
    gather = Exchange(control, GATHER_REGIONS, "gather")
    steps = []
    for step in range(NUM_STEPS):
        sizes = (NUM_RANKS, CONFIG.num_experts, CONFIG.num_choices, CONFIG.hidden)
        mine = make_inputs(step, *sizes, CONFIG.max_tokens)[rank]
        start_ms = transport.now_ms()
        die(step, "before_send")
        flight = mode.send_dispatch(mine.x_TH, mine.ids_TK)
        die(step, "between_send_and_hook")
        result = flight.receive(TIMEOUT_MS)
        statuses = [result.status]
        if result.status.must_stop:
            mode.abandon(result.handle)
        else:
            die(step, "in_combine")
            y = case.scale_by_expert(result, CONFIG, rank)
            y_TH, status = mode.combine(y, result.handle, mine.weights_TK, 2 * TIMEOUT_MS)
            statuses.append(status)
            assert_same_bits(sum_without(mine, CONFIG, status.missing), y_TH)
        die(step, "in_gather")
        steps.append(Step(statuses, transport.now_ms() - start_ms))
        transport.quiet()
        group.mask(set(range(NUM_RANKS)) - synchronise(control, gather, GATHER_MS))
        if not group.suspects and any(status.must_stop for status in statuses):
            mode.resume(100 * (step + 1))
    return steps


def start_ranks(
    name: str, place: Place, point: str, fault: signal.Signals
) -> tuple[list[multiprocessing.process.BaseProcess], multiprocessing.Queue[tuple[int, object]]]:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[int, object]] = context.Queue()

    def body(rank: int) -> None:
        torch.set_num_threads(1)

        def die(step: int, where: str) -> None:
            if (rank, step, where) == (VICTIM, FATAL_STEP, point):
                os.kill(os.getpid(), fault)

        try:
            results.put((rank, run_steps(place, name, rank, die)))
        except BaseException:
            results.put((rank, traceback.format_exc()))

    ranks = [context.Process(target=body, args=(rank,)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    return ranks, results


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize(
    "name",
    ["shm", pytest.param("faulty_shm", marks=pytest.mark.long),
     pytest.param("gloo", marks=pytest.mark.long)],
)  # fmt: skip
def test_survivors_name_the_rank_within_the_deadline_and_go_on_masked(
    name: str, point: str, fault: signal.Signals, tmp_path: Path
) -> None:
    place = make_place(HEAP, tmp_path)
    before = set(os.listdir("/dev/shm"))
    ranks, results = start_ranks(name, place, point, fault)
    try:
        found = dict(results.get(timeout=120) for _ in range(NUM_RANKS - 1))
    finally:
        ranks[VICTIM].kill()
        for process in ranks:
            process.join(timeout=30)
            process.kill()
        close_place(place)
    assert VICTIM not in found
    for rank, steps in found.items():
        assert isinstance(steps, list), f"rank {rank}:\n{steps}"
        check_steps(steps)
    named = [entry for entry in set(os.listdir("/dev/shm")) - before if "whalepod" in entry]
    assert named == []


def check_steps(steps: list[Step]) -> None:
    for number, step in enumerate(steps):
        for status in step.statuses:
            assert set(status.missing) <= {VICTIM}, status
        if number < FATAL_STEP:
            assert all(status.ok for status in step.statuses), step.statuses
        if number > FATAL_STEP:
            assert all(status.masked == (VICTIM,) for status in step.statuses), step.statuses
            assert step.elapsed_ms < TIMEOUT_MS, "nobody waits for a masked rank"
        assert step.elapsed_ms < 4 * TIMEOUT_MS, step.elapsed_ms


@pytest.mark.ranks
def test_a_rank_that_was_stopped_and_goes_on_finds_out_and_is_let_in_again(
    tmp_path: Path,
) -> None:
    """Stopped between send and hook for longer than the deadline, then continued."""
    place = make_place(HEAP, tmp_path)
    ranks, results = start_ranks("shm", place, "between_send_and_hook", signal.SIGSTOP)
    try:
        wait_until(lambda: is_stopped(ranks[VICTIM].pid))
        time.sleep(2 * TIMEOUT_MS / 1e3)  # the stop itself: that long it must be silent
        os.kill(ranks[VICTIM].pid or 0, signal.SIGCONT)
        found = dict(results.get(timeout=120) for _ in range(NUM_RANKS))
    finally:
        for process in ranks:
            process.join(timeout=30)
            process.kill()
        close_place(place)
    for rank, steps in found.items():
        assert isinstance(steps, list), f"rank {rank}:\n{steps}"
        assert len(steps) == NUM_STEPS


def is_stopped(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "T"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
