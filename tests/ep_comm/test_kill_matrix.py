"""Ranks that are killed or stopped at each point of a step: the others name them and go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from tests.ep_comm import test_by_expert as fast_case, test_by_token as bulk_case
from tests.ep_comm.groups import Inputs, make_inputs, run_loopback
from tests.ep_comm.test_faults import reliable, sum_without
from tests.ep_comm.transports import OPENERS, Place, close_place, make_place
from tests.equality import assert_same_bits
from whalepod.ep_comm import all_gather, config
from whalepod.ep_comm.all_gather import AllGather
from whalepod.ep_comm.expert_exchange import ExpertExchange
from whalepod.ep_comm.group import CallStatus, Group
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import SendRows
from whalepod.ep_comm.rows import RowFormat
from whalepod.ep_comm.transport.gloo import GlooTransport
from whalepod.ep_comm.transport.interface import Transport

NUM_RANKS = 3
TIMEOUT_MS = 1_000.0
GATHER_MS = 4 * TIMEOUT_MS
"""Longer than a rank can be behind another one: it may have waited for the victim's combine."""
NUM_STEPS = 4
FATAL_STEP = 1
POINTS = ["before_send", "between_send_and_hook", "in_combine", "in_gather"]
IN_A_STEP = POINTS[:3]
PLAIN = "plain low_latency"
"""Over the transport, though its heaps are mapped: several calls in a phase, so that a rank may end
between two of them."""

FAST = fast_case.make_config(NUM_RANKS, num_experts=12)
HEAP, FAST_REGIONS = fast_case.make_heap(FAST)
BULK = bulk_case.make_config(NUM_RANKS, NUM_RANKS, num_experts=12)
BULK_REGIONS = config.reserve(HEAP, BULK, "bulk")
GATHER_REGIONS = all_gather.reserve(HEAP, 8, "gather")

Die: TypeAlias = Callable[[int, str], None]
"""(step, point): called at each point; it may not return."""


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    name: str
    mode: str
    victim: int
    point: str
    fault: signal.Signals

    def __str__(self) -> str:
        return f"{self.name}-{self.mode}-{self.victim}-{self.point}-{self.fault.name}"

    def die(self, rank: int) -> Die:
        has_acted = False

        def act(step: int, point: str) -> None:
            nonlocal has_acted
            if (rank, step, point) == (self.victim, FATAL_STEP, self.point) and not has_acted:
                has_acted = True  # a throughput step comes to a point once per chunk
                os.kill(os.getpid(), self.fault)

        return act


QUICK = [
    Cell("shm", "low_latency", 1, point, fault)
    for point in POINTS
    for fault in (signal.SIGKILL, signal.SIGSTOP)
] + [
    Cell("shm", "throughput", 1, "between_send_and_hook", signal.SIGKILL),
    Cell("shm", "throughput", 1, "in_combine", signal.SIGSTOP),
    Cell("shm", PLAIN, 1, "between_send_and_hook", signal.SIGKILL),
    Cell("shm", PLAIN, 1, "in_combine", signal.SIGSTOP),
]
ALL = [
    Cell("shm", mode, victim, point, fault)
    for mode in ("low_latency", "throughput")
    for victim in range(NUM_RANKS)
    for point in POINTS
    for fault in (signal.SIGKILL, signal.SIGSTOP)
] + [
    Cell(name, mode, 1, point, fault)
    for name, mode in (("shm", PLAIN), ("faulty_shm", "low_latency"), ("gloo", "low_latency"))
    for point in POINTS
    for fault in (signal.SIGKILL, signal.SIGSTOP)
]
LONG = [cell for cell in ALL if cell not in QUICK]


@dataclass(frozen=True)
class Step:
    """What a rank reports of a step: the statuses, and when it began and ended."""

    statuses: list[CallStatus]
    began_ms: float
    ended_ms: float

    @property
    def elapsed_ms(self) -> float:
        return self.ended_ms - self.began_ms


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """Compile before ranks are forked: that takes longer than their deadlines."""
    alone = fast_case.make_config(1)  # with others, phases over a loopback are not one call
    heap, regions = fast_case.make_heap(alone)
    run_loopback(heap, fast_case.Round(alone, regions, (0,)))
    for is_plain in (False, True):
        run_loopback(HEAP, fast_case.Round(FAST, FAST_REGIONS, (0,), is_plain=is_plain))
    run_loopback(HEAP, bulk_case.Round(BULK, BULK_REGIONS, (0,)))


class DyingRows(CompiledRows):
    """Calls `after_pack` when rows are written and no signal is sent yet."""

    def __init__(self) -> None:
        self.after_pack: Callable[[], None] = lambda: None

    def pack(
        self,
        row_format: RowFormat,
        rows: SendRows,
        is_for_TD: Tensor,
        blocks: list[Tensor | None],  # type: ignore[override]
        first_token: int = 0,
    ) -> list[int]:
        counts = super().pack(row_format, rows, is_for_TD, blocks, first_token)
        self.after_pack()
        return counts


class FastSteps:
    """Steps by expert.

    rows  given: phases are not one call where heaps are mapped
    """

    def __init__(self, group: Group, patience_ms: float, rows: DyingRows | None = None) -> None:
        self._rows = rows or DyingRows()
        self.mode = ExpertExchange(group, FAST, FAST_REGIONS, row_kernels=rows, poison_unused=True)
        self._rank, self._patience_ms = group.rank, patience_ms

    def run(self, seed: int, die: Callable[[str], None]) -> list[CallStatus]:
        mine = make_inputs(seed, *_sizes(FAST.hidden), FAST.max_tokens)[self._rank]
        self._rows.after_pack = lambda: die("while_sending")
        die("before_send")
        flight = self.mode.send_dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK)
        die("between_send_and_hook")
        result = flight.receive(self._patience_ms)
        if result.status.must_stop:
            self.mode.abort()
            return [result.status]
        die("in_combine")
        y = fast_case.scale_by_expert(result, FAST, self._rank)
        y_TH, status = self.mode.combine(y, result.handle, 2 * self._patience_ms)
        assert_same_bits(sum_without(mine, FAST, status.missing), y_TH)
        return [result.status, status]


class BulkSteps:
    """Steps per token."""

    def __init__(self, group: Group, patience_ms: float) -> None:
        self._rows = DyingRows()
        self.mode = ExpertExchange(group, BULK, BULK_REGIONS, row_kernels=self._rows)
        self._rank, self._patience_ms = group.rank, patience_ms

    def run(self, seed: int, die: Callable[[str], None]) -> list[CallStatus]:
        mine = make_inputs(seed, *_sizes(BULK.hidden), BULK.max_tokens)[self._rank]
        self._rows.after_pack = lambda: self._after_pack(die)
        die("before_send")
        received = self.mode.dispatch(mine.x_TH, mine.ids_TK, mine.weights_TK, self._patience_ms)
        if received.status.must_stop:
            self.mode.abort()
            return [received.status]
        die("in_combine")
        y_NH = bulk_case.computed(received.rows, self._rank, BULK)
        y_TH, status = self.mode.combine(y_NH, received.handle, 2 * self._patience_ms)
        if status.must_stop:
            self.mode.abort()
        else:
            assert_same_bits(bulk_sum_without(mine, status.missing), y_TH)
        return [received.status, status]

    def _after_pack(self, die: Callable[[str], None]) -> None:
        """Be between the counts, which are all there, and the signal of the first rows."""
        die("between_send_and_hook")
        die("while_sending")


def _sizes(hidden: int) -> tuple[int, int, int, int]:
    return NUM_RANKS, FAST.num_experts, FAST.top_k, hidden


def bulk_sum_without(mine: Inputs, missing: tuple[int, ...]) -> Tensor:
    """Return the sum over what the ranks that are not missing make of the rows."""
    is_gone_TK = torch.isin(mine.ids_TK // BULK.num_local, torch.tensor(missing))
    kept_TK = mine.ids_TK.masked_fill((mine.ids_TK >= 0) & is_gone_TK, -1)
    return bulk_case.expected_sum(replace(mine, ids_TK=kept_TK), BULK)


class Ranks:
    """What one rank needs for its steps: an exchange, and a gather in which all agree who stays."""

    def __init__(self, place: Place, name: str, rank: int, mode: str, patience_ms: float) -> None:
        self.transport: Transport = OPENERS[name](place, rank)
        if isinstance(self.transport, GlooTransport):
            self.transport.patience_ms = TIMEOUT_MS / 3
        self.group = Group(self.transport)
        self.steps: FastSteps | BulkSteps
        if mode == "throughput":
            self.steps = BulkSteps(self.group, patience_ms)
        else:
            rows = DyingRows() if mode == PLAIN else None
            self.steps = FastSteps(self.group, patience_ms, rows)
        self._control = Group(reliable(self.transport))
        self._gather = AllGather(self._control, GATHER_REGIONS, "gather")
        self._gather_ms = 4 * patience_ms

    def agree(self, step: int, *, has_failed: bool) -> None:
        """Find out who is there and whether the step failed anywhere, as the gather of records
        does; the second time nobody waits for a dead rank any more."""
        self.transport.quiet()
        for _ in range(2):
            record, deadline_ms = (
                torch.tensor([has_failed]),
                self._control.deadline(self._gather_ms),
            )
            records, _ = self._gather.gather(record.long(), deadline_ms)
        gone = set(range(NUM_RANKS)) - set(records)
        self._control.mask(gone)
        self.group.mask(gone)
        if any(bool(one) for one in records.values()):
            self.steps.mode.resume(100 * (step + 1))


def run_steps(place: Place, cell: Cell, rank: int) -> list[Step]:
    """Dispatch, combine and gather, as long as the rank lives."""
    ranks, die = Ranks(place, cell.name, rank, cell.mode, TIMEOUT_MS), cell.die(rank)
    found = []
    for step in range(NUM_STEPS):
        began_ms = ranks.transport.now_ms()
        statuses = ranks.steps.run(step, lambda point, step=step: die(step, point))  # type: ignore[misc]
        die(step, "in_gather")
        found.append(Step(statuses, began_ms, ranks.transport.now_ms()))
        ranks.agree(step, has_failed=any(status.must_stop for status in statuses))
    return found


Processes: TypeAlias = list[multiprocessing.process.BaseProcess]
Results: TypeAlias = "multiprocessing.Queue[tuple[int, object]]"


def start_ranks(run: Callable[[int], object]) -> tuple[Processes, Results]:
    context = multiprocessing.get_context("fork")
    results: Results = context.Queue()

    def body(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            results.put((rank, run(rank)))
        except BaseException:
            results.put((rank, traceback.format_exc()))

    ranks: Processes = [context.Process(target=body, args=(rank,)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    return ranks, results


class Matrix:
    """Runs the cells of a session, a few at a time, since ranks wait more than they compute."""

    AT_ONCE = 4

    def __init__(self, cells: list[Cell], new_folder: Callable[[], Path]) -> None:
        self._cells, self._new_folder = cells, new_folder
        self._running: dict[Cell, tuple[Place, Processes, Results]] = {}

    def run(self, cell: Cell) -> dict[int, object]:
        """Return what each surviving rank found; the next cells run meanwhile."""
        first = self._cells.index(cell)
        for one in self._cells[first : first + self.AT_ONCE]:
            is_alone = "gloo" in (cell.name, one.name)  # its threads need the cores
            if one not in self._running and (one == cell or not is_alone):
                place = make_place(HEAP, self._new_folder())
                body = partial(run_steps, place, one)
                self._running[one] = (place, *start_ranks(body))
        _, _, results = self._running[cell]
        try:
            return dict(results.get(timeout=120) for _ in range(NUM_RANKS - 1))
        finally:
            self.end(cell)

    def end(self, cell: Cell) -> None:
        place, ranks, _ = self._running.pop(cell)
        ranks[cell.victim].kill()
        end_ranks(ranks, place)

    def close(self) -> None:
        for cell in [*self._running]:
            self.end(cell)


@pytest.fixture(scope="module")
def matrix(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Matrix]:
    chosen = [getattr(item, "callspec", None) for item in request.session.items]
    cells = [spec.params["cell"] for spec in chosen if spec and "cell" in spec.params]
    matrix = Matrix(
        [cell for cell in cells if isinstance(cell, Cell)],
        lambda: tmp_path_factory.mktemp("cell"),
    )
    yield matrix
    matrix.close()


def end_ranks(ranks: Processes, place: Place) -> None:
    for process in ranks:
        process.join(timeout=30)
        process.kill()
    close_place(place)


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    "cell", [*QUICK, *(pytest.param(cell, marks=pytest.mark.long) for cell in LONG)], ids=str
)
def test_survivors_name_the_rank_within_the_deadline_and_go_on_masked(
    cell: Cell, matrix: Matrix
) -> None:
    before = set(os.listdir("/dev/shm"))
    found = matrix.run(cell)
    assert cell.victim not in found
    for rank, steps in found.items():
        assert isinstance(steps, list), f"rank {rank}:\n{steps}"
        check_steps(steps, cell.victim)
    named = [entry for entry in set(os.listdir("/dev/shm")) - before if "whalepod" in entry]
    assert named == []


def check_steps(steps: list[Step], victim: int) -> None:
    for number, step in enumerate(steps):
        for status in step.statuses:
            assert set(status.missing) <= {victim}, status
        if number < FATAL_STEP:
            assert all(status.ok for status in step.statuses), step.statuses
        if number > FATAL_STEP:
            assert all(status.masked == (victim,) for status in step.statuses), step.statuses
            assert step.elapsed_ms < TIMEOUT_MS, "nobody waits for a masked rank"
        assert step.elapsed_ms < 4 * TIMEOUT_MS, step.elapsed_ms


RETURNS = [
    ("low_latency", "between_send_and_hook", 1, 2.0),
    *(
        pytest.param(mode, point, victim, 2.0, marks=pytest.mark.long)
        for mode in ("low_latency", "throughput")
        for point in POINTS
        for victim in range(NUM_RANKS)
        if (mode, point, victim) != ("low_latency", "between_send_and_hook", 1)
    ),
    *(
        pytest.param(mode, point, 1, 10.0, marks=pytest.mark.long)
        for mode in ("low_latency", "throughput")
        for point in POINTS
    ),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("mode", "point", "victim", "seconds"), RETURNS)
def test_a_rank_that_was_stopped_and_goes_on_finds_out_and_is_let_in_again(
    mode: str, point: str, victim: int, seconds: float, tmp_path: Path
) -> None:
    """2 s are over the deadline of a dispatch, and the others still wait for it in the gather;
    after 10 s they have gone on without it, which it finds out."""
    place = make_place(HEAP, tmp_path)
    cell = Cell("shm", mode, victim, point, signal.SIGSTOP)
    ranks, results = start_ranks(lambda rank: run_steps(place, cell, rank))
    try:
        wait_until(lambda: is_stopped(ranks[victim].pid))
        time.sleep(seconds)  # the stop itself: that long it must be silent
        os.kill(ranks[victim].pid or 0, signal.SIGCONT)
        found = dict(results.get(timeout=120) for _ in range(NUM_RANKS))
    finally:
        end_ranks(ranks, place)
    for rank, steps in found.items():
        assert isinstance(steps, list), f"rank {rank}:\n{steps}"
        assert len(steps) == NUM_STEPS
        last = steps[-1].statuses
        if seconds < GATHER_MS / 1e3:
            assert all(status.ok for status in last), last
        elif rank != victim:
            check_steps(steps, victim)
        else:
            assert not any(status.ok for status in last), "it knows that it is alone"


class Bug(Exception):
    """What a rank's step raises."""


def run_and_raise(place: Place, mode: str, rank: int) -> list[tuple[float, float | None]]:
    """Run steps in which each rank raises in turn, at each point; return for every step when it
    began, and when this rank raised or heard of it."""
    ranks, found = Ranks(place, "shm", rank, mode, 60 * TIMEOUT_MS), []
    points = IN_A_STEP if mode == "low_latency" else [*IN_A_STEP, "while_sending"]
    for step in range(len(points) * NUM_RANKS):
        victim, at = step % NUM_RANKS, points[step // NUM_RANKS]
        has_raised = []

        def fail(
            point: str, victim: int = victim, at: str = at, has_raised: list[float] = has_raised
        ) -> None:
            if rank == victim and point == at and not has_raised:
                has_raised.append(ranks.transport.now_ms())
                raise Bug

        began_ms = ranks.transport.now_ms()
        with suppress(Bug):
            statuses = ranks.steps.run(step, fail)
            assert any(status.blamed == (victim,) for status in statuses), statuses
            assert not any(status.late or status.gone for status in statuses), statuses
            has_raised.append(ranks.transport.now_ms())
        if rank == victim:
            ranks.steps.mode.abort()
        found.append((began_ms, has_raised[0]))
        ranks.agree(step, has_failed=True)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["low_latency", PLAIN, "throughput"])
def test_an_exception_in_a_step_is_answered_within_milliseconds(mode: str, tmp_path: Path) -> None:
    place = make_place(HEAP, tmp_path)
    ranks, results = start_ranks(lambda rank: run_and_raise(place, mode, rank))
    try:
        found = dict(results.get(timeout=120) for _ in range(NUM_RANKS))
    finally:
        end_ranks(ranks, place)
    delays_ms = []
    for rank, steps in found.items():
        assert isinstance(steps, list), f"rank {rank}:\n{steps}"
        for step, (began_ms, heard_ms) in enumerate(steps):
            if (victim := step % NUM_RANKS) != rank:
                delays_ms.append(heard_ms - max(began_ms, found[victim][step][1]))
    print(f"heard after {median(delays_ms):.2f} ms (median), {max(delays_ms):.2f} ms (most)")
    assert min(delays_ms) < TIMEOUT_MS / 100, "a few polls"
    assert max(delays_ms) < 6 * TIMEOUT_MS, "a tenth of the deadline, on a busy machine"


def is_stopped(pid: int | None) -> bool:
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "T"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)
