"""Ten minutes of mishaps on two ranks: at the end all is as it was at the start.

`pytest tests/end_to_end/test_chaos.py -m long -s --chaos-seconds 120` runs it for two minutes and
prints what happened. Needs root: the temporary folder is a small file system of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import random
import re
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.end_to_end.machines import Launch, Machine, launch, wait_for_address, whalepod
from tests.end_to_end.test_soak import Processes, read_metrics
from tests.gateway.serving import wait_until

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.ranks]

NUM_IDLE = 1_100
NUM_STREAMS = 6
NUM_DEAF = 2
PAUSE_S = 10.0
"""From one mishap, and what came of it, to the next."""
FULL_S = 4.0
PATIENCE_S = 240.0
LOSSES_PER_RANK = 4
"""One more is allowed within ten minutes; then the group is given up, on purpose."""
LIMITS = ("--max-model-len", "1024", "--kv-cache-memory", "64M", "--dispatch-timeout", "3")


@contextmanager
def small_folder(folder: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def clean(folder: Path) -> None:
    """Remove all that is not locked, as systemd-tmpfiles does with what is old."""
    for entry in folder.iterdir():
        if not entry.is_dir():
            continue
        descriptor = os.open(entry, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry)
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)


@dataclass
class Chaos:
    """A server, clients of all kinds, and what happens to them."""

    address: str
    pid: int
    folder: Path
    until_s: float
    rng: random.Random = field(default_factory=lambda: random.Random(13))
    ends: Counter[str] = field(default_factory=Counter)
    done: Counter[str] = field(default_factory=Counter)
    losses: Counter[tuple[int, ...]] = field(default_factory=Counter)
    recovery_s: dict[str, list[float]] = field(default_factory=dict)

    def ranks(self) -> list[int]:
        return [pid for pid in Processes(self.pid).pids() if "rank_process" in command_of(pid)]

    def rank_to_lose(self) -> int | None:
        """Return a rank that may be lost once more; ranks have cores of their own, spares all."""
        places = {pid: tuple(sorted(os.sched_getaffinity(pid))) for pid in self.ranks()}
        everywhere = set(os.sched_getaffinity(0))
        ranks = [
            pid
            for pid, place in places.items()
            if set(place) != everywhere and self.losses[place] < LOSSES_PER_RANK
        ]
        if not ranks:
            return None
        pid = self.rng.choice(ranks)
        self.losses[places[pid]] += 1
        return pid

    # -- mishaps --------------------------------------------------------------------------------

    async def kill(self) -> None:
        await self._end_rank(signal.SIGKILL)

    async def terminate(self) -> None:
        await self._end_rank(signal.SIGTERM)

    async def stop_for_good(self) -> None:
        await self._end_rank(signal.SIGSTOP)

    async def _end_rank(self, number: signal.Signals) -> None:
        pid = self.rank_to_lose()
        if pid is None:
            return
        started_s = time.monotonic()
        os.kill(pid, number)
        await until(lambda: not is_alive(pid))
        await self.until_ready()
        self.recovery_s.setdefault(number.name, []).append(time.monotonic() - started_s)

    async def stop_for_a_while(self) -> None:
        """Every process but the gateway, one after the other."""
        for pid in Processes(self.pid).pids()[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(1.0)
                os.kill(pid, signal.SIGCONT)

    async def stop_the_gateway(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        await asyncio.sleep(5.0)
        os.kill(self.pid, signal.SIGCONT)

    async def kill_helpers(self) -> None:
        """Kill what is no rank: the spare process, and what compiles grammars."""
        everywhere = os.sched_getaffinity(0)
        for pid in Processes(self.pid).pids()[1:]:
            with suppress(ProcessLookupError):
                if os.sched_getaffinity(pid) == everywhere:
                    os.kill(pid, signal.SIGKILL)

    async def fill_the_folder(self) -> None:
        """A rank dies while nothing can be written; space is free again after a while."""
        pid = self.rank_to_lose()
        ballast = self.folder / "ballast"
        with suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        await asyncio.sleep(FULL_S)
        ballast.unlink()

    async def mishaps(self) -> None:
        every: list[Callable[[], Awaitable[None]]] = [
            self.kill, self.terminate, self.fill_the_folder, self.stop_for_a_while,
            self.stop_the_gateway, self.kill_helpers, self.stop_for_good,
        ]  # fmt: skip
        number = 0
        while time.monotonic() < self.until_s:
            mishap = every[number % len(every)]
            number += 1
            self.done[mishap.__name__] += 1
            print(f"{mishap.__name__} ...", flush=True)
            await mishap()
            await self.until_ready()
            clean(self.folder)
            await asyncio.sleep(PAUSE_S)

    async def until_ready(self) -> None:
        timeout = aiohttp.ClientTimeout(total=30.0)
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with suppress(aiohttp.ClientError, TimeoutError):
                    async with (
                        aiohttp.ClientSession(timeout=timeout) as session,
                        session.get(f"{self.address}/ready") as response,
                    ):
                        if response.status == 200:
                            return
                await asyncio.sleep(0.1)

    # -- clients --------------------------------------------------------------------------------

    async def stream(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        body = {
            "model": "tiny",
            "stream": True,
            "max_tokens": 60,
            "messages": [{"role": "user", "content": "What is 3 + 7? " * 9}],
        }
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while time.monotonic() < self.until_s:
                try:
                    url = f"{self.address}/v1/chat/completions"
                    async with session.post(url, json=body) as response:
                        text = await response.text()
                        is_whole = text.endswith("data: [DONE]\n\n")
                        self.ends["done" if is_whole else f"{response.status}"] += 1
                        if response.status != 200:
                            await asyncio.sleep(0.5)
                except aiohttp.ClientError as error:
                    self.ends[type(error).__name__] += 1
                    await asyncio.sleep(0.5)

    async def idle(self) -> None:
        """Hold connections without a word; the server closes them, and they come again."""
        host, port = self.address.removeprefix("http://").split(":")
        connections: list[socket.socket] = []
        try:
            while time.monotonic() < self.until_s:
                connections += [socket.create_connection((host, int(port))) for _ in range(20)]
                for old in connections[: max(len(connections) - NUM_IDLE, 0)]:
                    old.close()
                connections = connections[-NUM_IDLE:]
                await asyncio.sleep(0.05 if len(connections) < NUM_IDLE else 1.0)
        finally:
            for connection in connections:
                connection.close()

    async def never_read(self) -> None:
        """Ask for a long answer, and leave it in the socket."""
        host, port = self.address.removeprefix("http://").split(":")
        body = (
            b'{"model":"tiny","stream":true,"prompt":"a","max_tokens":900,"ignore_eos":true,"n":4}'
        )
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        )
        while time.monotonic() < self.until_s:
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                connection.connect((host, int(port)))
                connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
                await asyncio.sleep(30.0)

    async def run(self) -> None:
        clients = [self.stream() for _ in range(NUM_STREAMS)]
        clients += [self.never_read() for _ in range(NUM_DEAF)]
        await asyncio.gather(self.mishaps(), self.idle(), *clients)


def is_listening(address: str) -> bool:
    host, port = address.removeprefix("http://").split(":")
    with suppress(OSError), socket.create_connection((host, int(port))):
        return True
    return False


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def command_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.05)


def whole(address: str) -> dict[str, float]:
    """Return what must be the same at the start and at the end of the run."""
    found = read_metrics(address)
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_owned_blocks")
    blocks = found["whalepod_kv_cache_free_blocks"] + found["whalepod_kv_cache_cached_blocks"]
    return {name: found[f"whalepod_{name}"] for name in names} | {"blocks": blocks}


def descriptors_of_clients(pid: int) -> int:
    """Return how many sockets of a process are TCP connections."""
    text = "".join(Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    own = {os.readlink(f) for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink()}
    inodes = {f"socket:[{line.split()[9]}]" for line in text.splitlines() if "inode" not in line}
    return len(own & inodes)


@contextmanager
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Launch, str]]:
    """Serve two ranks, with the soft limit of open files that most systems have."""
    monkeypatch.setenv("TMPDIR", str(folder))
    command = whalepod("serve", "tiny", "--ep", "2", "--port", "0", *LIMITS)
    limited = ("sh", "-c", 'ulimit -Sn 1024; exec "$@"', "sh")
    with launch(Machine("127.0.0.1", limited), *command) as serving:
        address = wait_for_address([serving])
        # it prints its address a moment before it listens to signals
        wait_until(lambda: is_listening(address), PATIENCE_S)
        yield serving, address
        serving.process.send_signal(signal.SIGTERM)
        assert serving.wait() == 0, serving.text


def test_a_server_starts_where_its_folder_for_sockets_is_read_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_folder(tmp_path / "tmp") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with server(folder, monkeypatch) as (serving, _):
            assert len(Processes(serving.process.pid).pids()) > 2


def test_ten_minutes_of_chaos_leave_nothing_behind(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = float(request.config.getoption("--chaos-seconds"))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    shared = set(os.listdir("/dev/shm"))
    with small_folder(tmp_path / "tmp") as folder:
        with server(folder, monkeypatch) as (serving, address):
            pid = serving.process.pid
            chaos = Chaos(address, pid, folder, time.monotonic() + seconds)
            asyncio.run(chaos.until_ready())
            wait_until(lambda: len(chaos.ranks()) == 3, PATIENCE_S)  # and their spare
            before, num_descriptors = whole(address), Processes(pid).num_descriptors()
            rss_bytes = Processes(pid).rss_bytes()[0]
            try:
                asyncio.run(chaos.run())
            finally:
                print_report(chaos, serving)
            asyncio.run(chaos.until_ready())
            wait_until(lambda: len(chaos.ranks()) == 3, PATIENCE_S)
            wait_until(lambda: descriptors_of_clients(pid) <= 2, PATIENCE_S)
            wait_until(lambda: whole(address) == before, PATIENCE_S)
            wait_until(lambda: Processes(pid).num_descriptors() <= num_descriptors + 8, PATIENCE_S)
            grown_mb = (Processes(pid).rss_bytes()[0] - rss_bytes) / 2**20
            print(f"the gateway grew by {grown_mb:.0f} MiB")
            assert grown_mb < 64
            (own,) = folder.glob("whalepod-*")
            names = sorted(re.sub(r"\d+", "N", path.name) for path in own.iterdir())
            assert set(names) <= {"epoch-N", "progress", "rankN.N"}, names
            assert names.count("rankN.N") == 2, "sockets of lost ranks are gone"
            pids = Processes(pid).pids()
        assert chaos.ends["done"] > 0
        wait_until(lambda: not any(is_alive(one) for one in pids), PATIENCE_S)
        assert list(folder.iterdir()) == []
    assert set(os.listdir("/dev/shm")) <= shared


def print_report(chaos: Chaos, serving: Launch) -> None:
    print(f"mishaps {dict(chaos.done)}, answers {dict(chaos.ends)}")
    for name, times in chaos.recovery_s.items():
        print(f"{name}: back after {statistics.median(times):.1f} s, {max(times):.1f} s at most")
    sys.stdout.write("".join(serving.lines[-40:]))
