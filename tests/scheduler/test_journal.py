"""A recorded run is replayed call by call, and the first difference is named."""

from __future__ import annotations

import io

import msgpack
import pytest

from tests.scheduler.simulated_engine import EOS, SimulatedEngine, make_request
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.journal import JournalError, RecordedScheduler, replay
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import StepResult


def record() -> bytes:
    """Record a run with a refusal, a wrong result, a failed step, a cancel, drafts, a reset."""
    file = io.BytesIO()
    scheduler = RecordedScheduler(
        SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=64),
        file=file,
        num_blocks=6,
        eos_token_ids=frozenset({EOS}),
        prefix_seed=b"model",
        block_tokens=4,
    )
    engine = SimulatedEngine(scheduler)
    engine.num_drafts = 2
    for i in range(4):
        scheduler.add(
            make_request(
                f"r{i}", [1, 2, 3, 4, 5, i], n=1 + i % 2, logprobs=2, logit_bias={3: 1.5}, seed=i
            )
        )
    with pytest.raises(RequestRejected):
        scheduler.add(make_request("long", [1] * 99))
    plan = engine.step()
    assert plan is not None
    with pytest.raises(ValueError, match="in flight is 1"):
        scheduler.finish(StepResult(step=5, rows=()))
    engine.fail(plan)
    scheduler.cancel("r2")
    scheduler.cancel("r3", 1)
    while scheduler.has_work:
        scheduler.note_clock(123)
        engine.run_step()
    assert scheduler.reset_prefix_cache() > 0
    return file.getvalue()


def frames(data: bytes) -> list[list[object]]:
    return list(msgpack.Unpacker(io.BytesIO(data), strict_map_key=False))


def pack(items: list[list[object]]) -> io.BytesIO:
    return io.BytesIO(b"".join(msgpack.packb(item) for item in items))


def test_recorded_run_replays_without_a_difference() -> None:
    data = record()
    assert len(frames(data)) > 30
    assert replay(io.BytesIO(data)) is None


def test_first_different_outcome_is_named() -> None:
    items = frames(record())
    steps = [i for i, item in enumerate(items) if item[0] == "step"]
    where = steps[3] + 1
    assert items[where][0] == "returned"
    recorded = items[where][1]
    items[where][1] = "another digest"
    divergence = replay(pack(items))
    assert divergence is not None
    assert (divergence.call, divergence.frame, divergence.step) == ("step", (where + 1) // 2, 3)
    assert divergence.recorded == "returned another digest"
    assert divergence.replayed == f"returned {recorded}"


def test_different_token_of_the_model_shows_in_the_outputs() -> None:
    items = frames(record())
    finish = next(item for item in items if item[0] == "finish" and item[1][0][0] == 2)
    rows = finish[1][0][1]
    sampling = next(row for row in rows if len(row[1]) == 1)
    sampling[1] = [4 if sampling[1] != [4] else 5]
    divergence = replay(pack(items))
    assert divergence is not None
    assert divergence.call == "finish"


def test_refusal_that_does_not_happen_again_is_a_difference() -> None:
    items = frames(record())
    where = items.index(["raised", "RequestRejected"])
    items[where - 1][1][1] = [1]
    divergence = replay(pack(items))
    assert divergence is not None
    assert divergence.recorded == "raised RequestRejected"


@pytest.mark.parametrize("num_bytes", [1, 7, 40])
def test_journal_cut_off_by_a_crash_replays_up_to_there(num_bytes: int) -> None:
    assert replay(io.BytesIO(record()[:-num_bytes])) is None


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "found nothing"),
        ([["whalepod journal", 99, {}]], r"\('whalepod journal', 5\).* 99"),
        ([["another file", 1, {}]], "another file"),
        ([3], "a frame is 3"),
    ],
)
def test_other_formats_and_versions_are_refused(items: list[list[object]], message: str) -> None:
    with pytest.raises(JournalError, match=message):
        replay(pack(items))


def test_damaged_journal_is_refused() -> None:
    data = record()
    with pytest.raises(JournalError, match="damaged"):
        replay(io.BytesIO(data[: len(data) // 2] + b"\xc1" * 20))


def test_unknown_call_is_refused() -> None:
    items = [*frames(record())[:1], ["explode", []], ["returned", "x"]]
    with pytest.raises(JournalError, match="unknown call 'explode'"):
        replay(pack(items))
