"""Launchers that meet in one process: every way in which they do not is one sentence for all."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from whalepod.server.cluster.deadline import Deadline
from whalepod.server.cluster.group_store import GroupStore, StoreLost, connect_library, open_store
from whalepod.server.cluster.join_group import (
    SILENCE_S,
    End,
    JoinedGroup,
    end_group,
    meet,
    read_end,
)
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.errors import StartupError

LOOPBACK = "127.0.0.1"
SETTINGS = {"model": "abcdef0123456789", "dtype": "fp32"}
ADDRESSES = {0: LOOPBACK, 2: LOOPBACK}


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        return int(listener.getsockname()[1])


def plan_of(node: int, port: int, *, timeout_s: float = 20.0) -> NodePlan:
    return NodePlan(
        first_rank=2 * node,
        num_local=2,
        num_ranks=4,
        ranks_per_node=2,
        address=LOOPBACK,
        port=port,
        hosts_store=node == 0,
        timeout_s=timeout_s,
        source="test",
    )


@pytest.fixture
def stores() -> tuple[GroupStore, GroupStore]:
    """Machine 0's store, and another machine's end of it."""
    port = free_port()
    own = open_store(plan_of(0, port), Deadline(20.0))
    return own, open_store(plan_of(1, port), Deadline(20.0))


def both(first: Callable[[], object], second: Callable[[], object]) -> list[object]:
    """Run two launchers at once; return what they return or raise."""

    def outcome(function: Callable[[], object]) -> object:
        try:
            return function()
        except StartupError as error:
            return str(error)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(outcome, (first, second)))


def met(
    stores: tuple[GroupStore, GroupStore],
    *,
    settings: dict[str, str] = SETTINGS,
    node: int = 1,
    timeout_s: float = 20.0,
) -> list[object]:
    """Let machine 0 meet another one that was started with these settings."""
    return both(
        lambda: meet(stores[0], plan_of(0, 1), SETTINGS, "/a/nano", Deadline(timeout_s)),
        lambda: meet(stores[1], plan_of(node, 1), settings, "/b/nano", Deadline(timeout_s)),
    )


def test_machines_meet_and_know_where_each_rank_is(
    stores: tuple[GroupStore, GroupStore],
) -> None:
    assert met(stores) == [ADDRESSES, ADDRESSES]
    assert JoinedGroup(stores[0], plan_of(0, 1), ADDRESSES).describe(3) == "rank 3 (127.0.0.1)"


def test_another_model_or_flag_is_named_with_its_ranks_on_all_machines(
    stores: tuple[GroupStore, GroupStore],
) -> None:
    other = {"model": "9999999999", "dtype": "bf16"}
    first, second = met(stores, settings=other)
    assert first == second
    assert "dtype: fp32 on ranks [0]; bf16 on ranks [2]" in str(first)
    assert "/a/nano (abcdef01) on ranks [0]; /b/nano (99999999) on ranks [2]" in str(first)


def test_a_rank_that_is_taken_is_refused(stores: tuple[GroupStore, GroupStore]) -> None:
    first, second = met(stores, node=0)
    assert "rank 0 is taken by 127.0.0.1" in f"{first}{second}"
    assert "--node-rank" in f"{first}{second}"


def test_who_does_not_come_is_named_while_waiting_and_at_the_end(
    stores: tuple[GroupStore, GroupStore], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    times = iter([0.0, 31.0, 400.0])
    deadline = Deadline(300.0, clock=lambda: next(times))
    with pytest.raises(StartupError, match="ranks 2, 3 of 4 did not come within 300 s"):
        meet(stores[0], plan_of(0, 1), SETTINGS, "nano", deadline)
    assert "waiting for ranks 2, 3 of 4, 31 s of 300 s" in caplog.text
    late = Deadline(20.0)
    with pytest.raises(StartupError, match="ranks 2, 3 of 4 did not come"):
        meet(stores[1], plan_of(1, 1), SETTINGS, "nano", late)


def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen at 127.0.0.1:{port}.*in use"):
            open_store(plan_of(0, port), Deadline(1.0))


def test_an_address_where_nothing_listens_is_one_sentence() -> None:
    port = free_port()
    with pytest.raises(StartupError, match=rf"nothing answers at 127.0.0.1:{port} .*refused"):
        open_store(plan_of(1, port), Deadline(0.8))


def test_a_launcher_that_is_told_to_stop_waits_no_longer() -> None:
    with pytest.raises(StartupError, match="told to stop"):
        open_store(plan_of(1, free_port()), Deadline(300.0, lambda: "told to stop"))


# -- the store ----------------------------------------------------------------------------------

STORE_PROGRAM = """
import sys
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def foreign_store() -> Iterator[subprocess.Popen[str]]:
    """A store in a process that can be killed and stopped; its port is the first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", STORE_PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def port_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def connect(port: int) -> GroupStore:
    raw = connect_library(plan_of(1, port))
    return GroupStore(raw, f"{LOOPBACK}:{port}", LOOPBACK)


def test_a_store_that_dies_is_named(foreign_store: subprocess.Popen[str]) -> None:
    port = port_of(foreign_store)
    store = connect(port)
    assert store.get("x") is None
    foreign_store.kill()
    foreign_store.wait()
    for _ in range(2):
        with pytest.raises(StoreLost, match=f"the store at 127.0.0.1:{port} is gone"):
            store.get("x")


def test_a_store_that_does_not_answer_is_lost_at_the_deadline(
    foreign_store: subprocess.Popen[str],
) -> None:
    port = port_of(foreign_store)
    raw = TCPStore(LOOPBACK, port, None, False, timedelta(seconds=300), wait_for_workers=False)
    store = GroupStore(raw, f"{LOOPBACK}:{port}", LOOPBACK, timeout_s=0.5)
    store.set("a", "1")
    foreign_store.send_signal(signal.SIGSTOP)
    with pytest.raises(StoreLost, match=r"has not answered for 0\.5 s"):
        store.get("a")
    foreign_store.send_signal(signal.SIGCONT)
    with pytest.raises(StoreLost):
        store.get("a")  # once lost, always lost


def test_a_library_that_waits_for_a_key_holds_up_no_other(
    foreign_store: subprocess.Popen[str],
) -> None:
    port = port_of(foreign_store)
    store = connect(port)
    with ThreadPoolExecutor(1) as pool:
        library = connect_library(plan_of(1, port), 60.0)
        value = pool.submit(library.get, "late")
        store.set("a", "1")
        assert store.get("a") == "1"
        assert not value.done()
        store.set("late", "2")
        assert value.result(20.0) == b"2"


# -- the end ------------------------------------------------------------------------------------


def test_the_first_reason_is_everybodys(stores: tuple[GroupStore, GroupStore]) -> None:
    assert read_end(stores[0]) is None
    first = end_group(stores[1], End(1, "rank 3 was ended by SIGKILL"))
    assert end_group(stores[0], End(0, "told to stop")) == first
    watch = JoinedGroup(stores[0], plan_of(0, 1), ADDRESSES)
    assert watch.look() == first


def test_machine_0_keeps_the_store_until_the_others_have_left(
    stores: tuple[GroupStore, GroupStore],
) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(JoinedGroup(stores[0], plan_of(0, 1), ADDRESSES).leave, 60.0)
        assert not waiting.done()
        JoinedGroup(stores[1], plan_of(1, 1), ADDRESSES).leave(60.0)
        waiting.result(20.0)


@pytest.mark.parametrize(("node", "silent"), [(0, "ranks 2, 3"), (1, "ranks 0, 1")])
def test_a_machine_that_falls_silent_ends_the_group(
    stores: tuple[GroupStore, GroupStore], node: int, silent: str
) -> None:
    now = 0.0
    watch = JoinedGroup(stores[0], plan_of(node, 1), ADDRESSES, clock=lambda: now)
    other = JoinedGroup(stores[1], plan_of(1 - node, 1), ADDRESSES, clock=lambda: 0.0)
    for _ in range(4):
        now += SILENCE_S - 1.0
        assert other.look() is None
        assert watch.look() is None
    now += SILENCE_S + 1.0
    end = watch.look()
    assert end == End(1, f"the machine of {silent} (127.0.0.1) is silent for 30 s")
    assert other.look() == end
