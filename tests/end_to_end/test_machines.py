"""Several machines serve one model: the bits of one rank, sleep, and ends that all notice."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest

from tests.end_to_end.asking import answers_of_one, assert_equal_answers, mixed_bodies
from tests.end_to_end.machines import (
    Launch,
    Machine,
    ask_from,
    launch,
    namespaces,
    ranks_of,
    torchrun,
    wait_for_address,
    whalepod,
)
from tests.engine.test_launch import cpu_seconds
from tests.gateway.serving import wait_until

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

LOOPBACK = [Machine("127.0.0.1"), Machine("127.0.0.1")]
INTERVAL_S = 2.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def flags(num_ranks: int) -> list[str]:
    return [
        "--ep", str(num_ranks), "--dtype", "fp32", "--batch-invariant", "--num-threads", "1",
        "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-model-len", "256",
        "--kv-cache-memory", "16M", "--dispatch-timeout", "30",
    ]  # fmt: skip


@contextmanager
def running_torchrun(
    machines: list[Machine], folder: Path, ranks_per_node: int
) -> Iterator[list[Launch]]:
    """Start the same command by torchrun on both machines."""
    port = free_port()
    host = machines[0].address
    arguments = [
        str(folder), *flags(2 * ranks_per_node), "--served-model-name", "nano",
        "--host", host, "--port", "8000" if machines[0].prefix else "0",
    ]  # fmt: skip
    first, second = (torchrun(i, machines, port, ranks_per_node, *arguments) for i in (0, 1))
    with launch(machines[0], *first) as leader, launch(machines[1], *second) as other:
        yield [leader, other]


@contextmanager
def leader_and_workers(folder: Path, *, num_nodes: int) -> Iterator[list[Launch]]:
    """Start `num_nodes` machines of one rank each on loopback, as people do without torchrun; the
    leader is the first."""
    arguments = [
        str(folder), *flags(num_nodes), "--num-nodes", str(num_nodes),
        "--master-address", "127.0.0.1", "--master-port", str(free_port()),
    ]  # fmt: skip
    with ExitStack() as stack:
        workers = [
            stack.enter_context(
                launch(LOOPBACK[1], *whalepod("worker", *arguments, "--node-rank", str(rank)))
            )
            for rank in range(1, num_nodes)
        ]
        leader = launch(LOOPBACK[0], *whalepod("serve", *arguments, "--port", "0"))
        yield [stack.enter_context(leader), *workers]


def check_bits(machines: list[Machine], folder: Path, ranks_per_node: int, count: int) -> None:
    bodies = mixed_bodies("nano", count)
    expected = answers_of_one(folder, bodies)
    with running_torchrun(machines, folder, ranks_per_node) as launches:
        address = wait_for_address(launches)
        num_ranks = 2 * ranks_per_node
        assert f"{num_ranks} over gloo, on 2 machines (torchrun)" in launches[0].text
        found = ask_from(machines[0], address, bodies)
        assert_equal_answers(bodies, expected, found)
        check_sleep(launches)
        launches[0].process.send_signal(signal.SIGTERM)  # torchrun tells all processes of its own
        launches[0].wait()
        assert launches[1].wait() == 0, launches[1].text
        assert "was told to stop" in launches[1].text


def check_sleep(launches: list[Launch]) -> None:
    """A group without work uses under 1 % of a core on each rank."""
    pids = [pid for one in launches for pid in ranks_of(one.process.pid)]
    assert pids
    time.sleep(1.0)  # they park
    before = [cpu_seconds(pid) for pid in pids]
    time.sleep(INTERVAL_S)  # the interval that is measured
    used = [cpu_seconds(pid) - b for pid, b in zip(pids, before, strict=True)]
    assert max(used) < 0.01 * INTERVAL_S, used


def test_two_machines_started_by_torchrun_answer_with_the_bits_of_one_rank(
    nano_folder: Path,
) -> None:
    check_bits(LOOPBACK, nano_folder, ranks_per_node=1, count=16)


@pytest.mark.long
def test_two_network_namespaces_answer_with_the_bits_of_one_rank(nano_folder: Path) -> None:
    """Two machines with two ranks each, that share nothing but a wire. Needs root."""
    with namespaces() as machines:
        check_bits(machines, nano_folder, ranks_per_node=2, count=64)


def test_a_rank_that_is_killed_ends_all_machines_with_one_reason(nano_folder: Path) -> None:
    with leader_and_workers(nano_folder, num_nodes=2) as (leader, worker):
        address = wait_for_address([leader, worker])
        assert "2 over gloo, on 2 machines (--num-nodes)" in leader.text
        (rank,) = ranks_of(worker.process.pid)
        os.kill(rank, signal.SIGKILL)
        for one in (leader, worker):
            assert one.wait() == 1, one.text
            assert "rank 1's process on 127.0.0.1 was ended by SIGKILL" in one.text
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{address}/ready")


def test_a_worker_that_is_told_to_stop_lets_all_finish_and_end_well(nano_folder: Path) -> None:
    with leader_and_workers(nano_folder, num_nodes=2) as (leader, worker):
        wait_for_address([leader, worker])
        worker.process.send_signal(signal.SIGTERM)
        for one in (leader, worker):
            assert one.wait() == 0, one.text
        assert "the machine of rank 1 (127.0.0.1) was told to stop" in worker.text


def test_a_rank_that_cannot_start_says_why_on_all_machines(nano_folder: Path) -> None:
    with leader_and_workers(nano_folder, num_nodes=3) as launches:
        for one in launches:
            assert one.wait() == 1, one.text
            assert "3 does not divide the model's 8 experts" in one.text


def test_a_launcher_that_is_killed_ends_the_others(nano_folder: Path) -> None:
    """Machine 0 holds the store: without it nobody goes on, ranks neither."""
    with leader_and_workers(nano_folder, num_nodes=2) as (leader, worker):
        wait_for_address([leader, worker])
        pids = ranks_of(worker.process.pid) + ranks_of(leader.process.pid)
        leader.process.kill()
        assert worker.wait() == 1, worker.text
        assert "the store at 127.0.0.1" in worker.text
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))


def test_A6_a_server_whose_only_engine_is_killed_starts_another(nano_folder: Path) -> None:
    flags = ["--dtype", "fp32", "--num-threads", "1", "--kv-cache-memory", "16M", "--port", "0"]
    module = "whalepod.server.engine_process"
    with launch(LOOPBACK[0], *whalepod("serve", str(nano_folder), *flags)) as server:
        address = wait_for_address([server])
        (engine,) = ranks_of(server.process.pid, module)
        os.kill(engine, signal.SIGKILL)
        wait_until(lambda: "the engine is back" in server.text, 120.0)
        assert ranks_of(server.process.pid, module) != [engine]
        assert httpx2.get(f"{address}/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0, server.text
