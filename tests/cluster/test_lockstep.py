"""Decisions of a group, stepped by hand."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from torch._C._distributed_c10d import HashStore

from tests.cluster.ranks import MemoryStore
from whalepod.ep_comm.handshake import HandshakeError
from whalepod.mtp.depth import AdaptiveDepth, FixedDepth
from whalepod.mtp.stats import StepRecord
from whalepod.server.cluster.lockstep import Lockstep, Park, Remove, Step
from whalepod.server.cluster.membership_store import FolderStore, Membership, StaticMembership
from whalepod.server.cluster.rank_record import (
    RankRecord,
    StepOutcome,
    from_tensor,
    group_step,
    record_bytes,
    to_tensor,
)
from whalepod.server.errors import GroupLost

IDLE = RankRecord(version=7)
DECODING = replace(IDLE, num_tokens=3, num_drafts=4)
PREFILLING = replace(IDLE, num_tokens=65, num_drafts=4)


def new_lockstep(depth: int = 0) -> Lockstep:
    """Return one that has made its first step, which always renumbers."""
    lockstep = Lockstep(
        max_low_latency_tokens=64, new_depth=(lambda: FixedDepth(depth)) if depth else None
    )
    assert lockstep.decide({0: DECODING}) == Step("low_latency", depth, (0, 0))
    return lockstep


def test_a_group_without_work_parks_and_one_with_work_steps_together() -> None:
    lockstep = new_lockstep()
    assert lockstep.decide({0: IDLE, 1: IDLE}) == Park()
    assert lockstep.decide({0: IDLE, 1: DECODING}) == Step("low_latency", 0, None)


@pytest.mark.parametrize(
    ("most", "mode"), [(1, "low_latency"), (64, "low_latency"), (65, "throughput")]
)
def test_the_largest_rank_decides_the_mode_of_all(most: int, mode: str) -> None:
    records = {0: DECODING, 1: replace(IDLE, num_tokens=most), 2: IDLE}
    decision = new_lockstep().decide(records)
    assert isinstance(decision, Step)
    assert decision.mode == mode


def test_the_draft_layer_runs_equally_often_on_all_ranks_and_not_if_nobody_wants_drafts() -> None:
    lockstep = new_lockstep(depth=3)
    assert lockstep.decide({0: DECODING, 1: IDLE}) == Step("low_latency", 3, None)
    assert lockstep.decide({0: replace(DECODING, num_drafts=2), 1: IDLE}) == Step(
        "low_latency", 2, None
    )
    assert lockstep.decide({0: replace(DECODING, num_drafts=0)}) == Step("low_latency", 0, None)


@pytest.mark.parametrize("outcome", [StepOutcome.FAILED_HERE, StepOutcome.FAILED_ELSEWHERE])
def test_after_a_failed_step_all_number_their_calls_above_the_highest(outcome: StepOutcome) -> None:
    lockstep = new_lockstep()
    records = {
        0: replace(DECODING, calls=(10, 4)),
        1: replace(DECODING, calls=(8, 5), outcome=outcome),
    }
    failed = lockstep.decide(records)
    assert isinstance(failed, Step)
    assert failed.renumber == (10, 5)
    level = {
        rank: replace(record, calls=(12, 6), outcome=StepOutcome.DONE)
        for rank, record in records.items()
    }
    after = lockstep.decide(level)
    assert isinstance(after, Step)
    assert after.renumber is None


def test_a_slow_rank_is_given_more_time_for_a_while_and_one_that_raises_is_not() -> None:
    lockstep = new_lockstep()
    late = {0: replace(DECODING, outcome=StepOutcome.FAILED_ELSEWHERE), 1: IDLE}
    raising = {0: late[0], 1: replace(IDLE, outcome=StepOutcome.FAILED_HERE)}

    def patience(records: dict[int, RankRecord], count: int) -> int:
        decisions = [lockstep.decide(records) for _ in range(count)]
        assert isinstance(decisions[-1], Step)
        return decisions[-1].patience

    assert patience(raising, 3) == 1
    assert [patience(late, 1) for _ in range(6)] == [2, 4, 8, 16, 16, 16]
    calm = {0: DECODING, 1: IDLE}
    assert patience(calm, 63) == 16
    assert patience(calm, 1) == 8
    assert patience(calm, 3 * 64) == 1


def test_ranks_whose_calls_differ_are_brought_together_though_none_has_failed() -> None:
    records = {0: replace(DECODING, calls=(3, 0)), 1: replace(IDLE, calls=(2, 0))}
    assert new_lockstep().decide(records) == Step("low_latency", 0, (3, 0))


def test_a_renumbering_that_falls_into_a_park_is_made_up_for() -> None:
    lockstep = new_lockstep()
    assert (
        lockstep.decide({0: replace(IDLE, outcome=StepOutcome.FAILED_HERE, calls=(5, 0))}) == Park()
    )
    assert lockstep.decide({0: replace(DECODING, calls=(5, 0))}) == Step("low_latency", 0, (5, 0))


def test_a_late_rank_is_removed_by_the_lowest_that_is_not() -> None:
    finding = replace(DECODING, late=frozenset({0}))
    records = {0: DECODING, 1: IDLE, 2: finding}
    assert new_lockstep().decide(records) == Remove(frozenset({0}), by=1)


def test_of_two_that_find_each_other_late_the_lower_is_believed() -> None:
    records = {
        1: replace(IDLE, late=frozenset({3})),
        3: replace(IDLE, late=frozenset({1, 2})),
        2: IDLE,
    }
    assert new_lockstep().decide(records) == Remove(frozenset({3}), by=1)


def test_ranks_with_other_weights_never_compute_together() -> None:
    records = {0: DECODING, 1: replace(DECODING, version=8)}
    with pytest.raises(HandshakeError, match=r"\{0: 7, 1: 8\}"):
        new_lockstep().decide(records)


def decode_step(num_rows: int, depth: int, *, is_right: bool) -> StepRecord:
    """Return a step that takes 30 % longer for each draft, all of which are right, or none."""
    judged = (num_rows,) * depth if is_right else (num_rows,) * min(depth, 1)
    return StepRecord(
        num_rows=num_rows, num_tokens=num_rows * (1 + depth), is_decode=True, num_judged=judged,
        num_accepted=judged if is_right else (0,) * len(judged), num_passes=depth,
        step_time_us=1000 + 300 * depth, draft_time_us=100 * depth,
    )  # fmt: skip


@pytest.mark.parametrize(("is_right", "expected"), [(True, range(1, 5)), (False, range(1))])
def test_the_depth_follows_the_whole_group_and_is_the_same_on_every_rank(
    is_right: bool, expected: range
) -> None:
    """One rank, with most of the rows, decides for the other one too."""
    ranks = [Lockstep(max_low_latency_tokens=64, new_depth=lambda: AdaptiveDepth(4)) for _ in "ab"]
    depth = 1
    for _ in range(60):
        steps = [decode_step(6, depth, is_right=is_right), decode_step(1, depth, is_right=True)]
        records = {n: replace(DECODING, last_step=step) for n, step in enumerate(steps)}
        decisions = [lockstep.decide(records) for lockstep in ranks]
        assert decisions[0] == decisions[1]
        assert isinstance(decisions[0], Step)
        depth = decisions[0].num_drafts
    assert depth in expected


counts = st.lists(st.integers(1, 50), max_size=4).map(tuple)
steps = st.builds(
    StepRecord,
    **{f.name: st.integers(0, 1 << 40) for f in fields(StepRecord) if f.type == "int"},
    is_decode=st.booleans(),
    num_judged=counts,
)
records = st.builds(
    RankRecord,
    version=st.integers(0, (1 << 56) - 1),
    outcome=st.sampled_from(StepOutcome),
    calls=st.tuples(st.integers(0, 1 << 50), st.integers(0, 1 << 50)),
    num_tokens=st.integers(0, 1 << 20),
    num_drafts=st.integers(0, 4),
    late=st.frozensets(st.integers(0, 149)),
    last_step=steps,
)


@given(records)
def test_records_travel_unchanged_in_a_fixed_size(record: RankRecord) -> None:
    step = record.last_step
    record = replace(record, last_step=replace(step, num_accepted=step.num_judged))
    tensor = to_tensor(record, 150)
    assert tensor.nbytes == record_bytes(150)
    assert from_tensor(tensor) == record


def test_the_step_of_a_group_has_the_drafts_of_all_and_the_size_of_the_largest() -> None:
    small = StepRecord(
        num_rows=2, num_tokens=4, is_decode=True, num_judged=(2, 1), num_accepted=(1, 0),
        num_passes=2, step_time_us=900, draft_time_us=80,
    )  # fmt: skip
    large = replace(
        small, num_rows=5, num_tokens=9, num_judged=(5,), num_accepted=(5,), step_time_us=950
    )
    summed = group_step(replace(IDLE, last_step=s) for s in (small, large, StepRecord()))
    assert (summed.num_judged, summed.num_accepted) == ((7, 1), (6, 0))
    assert (summed.num_rows, summed.num_tokens, summed.step_time_us) == (5, 9, 950)
    assert summed.is_decode


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> FolderStore:
    return MemoryStore() if request.param == "memory" else FolderStore(tmp_path)


def test_of_two_that_commit_the_same_epoch_one_succeeds(store: FolderStore) -> None:
    assert store.newest() == Membership(0)
    assert store.commit(Membership(1, frozenset({0})))
    assert not store.commit(Membership(1, frozenset({1})))
    assert store.newest() == Membership(1, frozenset({0}))
    assert not store.is_newest(0)
    assert store.is_newest(1)
    assert not store.commit(Membership(3, frozenset({1}))), "an epoch cannot be left out"


def test_changes_build_on_each_other(store: FolderStore) -> None:
    for rank in (2, 0, 1):
        store.join(rank)
    assert store.newest() == Membership(3, frozenset({0, 1, 2}))
    store.remove(frozenset({1}))
    removed = Membership(4, frozenset({0, 2}))
    assert store.newest() == removed
    store.remove(frozenset({1}))
    store.remove(frozenset({0}), epoch=3)
    assert store.newest() == removed, "nothing is left to remove, or another membership holds"


def test_C1_many_that_commit_at_once_all_succeed_in_the_end(tmp_path: Path) -> None:
    stores = [FolderStore(tmp_path) for _ in range(2)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rank: stores[rank % 2].join(rank), range(8)))
    assert stores[0].newest() == Membership(8, frozenset(range(8)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch-{i}" for i in range(1, 9)]


def test_a_rank_is_removed_also_when_the_file_of_the_membership_has_vanished(
    tmp_path: Path,
) -> None:
    """To commit is not to ask for that file: `change` would try for ever."""
    stores = [FolderStore(tmp_path) for _ in range(2)]
    stores[0].join(0)
    stores[0].join(1)
    assert stores[1].newest().epoch == 2
    for file in tmp_path.iterdir():
        file.unlink()

    assert stores[0].commit(Membership(3, frozenset({0})))
    assert not stores[1].commit(Membership(3, frozenset({1})))
    assert not stores[1].commit(Membership(5, frozenset({1})))
    stores[1].remove(frozenset({0}))
    assert [store.newest() for store in stores] == [Membership(4)] * 2


def test_A3_a_membership_whose_file_has_vanished_still_holds(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.join(0)
    store.join(1)
    known = store.newest()
    for path in tmp_path.iterdir():
        path.unlink()
    assert store.newest() == known == Membership(2, frozenset({0, 1}))


def test_A3_a_fresh_rank_over_vanished_memberships_meets_the_others(tmp_path: Path) -> None:
    survivor = FolderStore(tmp_path)
    for rank in (0, 1):
        survivor.join(rank)
    survivor.remove(frozenset({1}))
    for path in tmp_path.iterdir():
        path.unlink()
    assert FolderStore(tmp_path).newest() == Membership(0), "alone it would begin at 0 again"

    fresh = FolderStore(tmp_path, survivor.newest())
    fresh.join(1)
    assert survivor.newest() == fresh.newest() == Membership(4, frozenset({0, 1}))


def test_A6_a_folder_that_has_vanished_ends_the_group(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "gone")
    with pytest.raises(GroupLost, match="gone has vanished"):
        store.join(0)


def test_a_group_that_replaces_nobody_has_one_membership_once_all_are_ready() -> None:
    raw = HashStore()
    stores = [StaticMembership(raw, 2) for _ in range(2)]
    stores[0].join(0)
    assert [store.newest() for store in stores] == [Membership(0), Membership(0)]
    assert all(store.is_newest(0) for store in stores)
    stores[1].join(1)
    assert not any(store.is_newest(0) for store in stores)
    assert [store.newest() for store in stores] == [Membership(1, frozenset({0, 1}))] * 2
    assert all(store.is_newest(1) for store in stores)
    with pytest.raises(GroupLost, match="rank 1 does not come to the exchange of records"):
        stores[0].remove(frozenset({1}), epoch=1)
