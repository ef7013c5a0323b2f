"""What goes wrong around an engine's process is repaired, or is one sentence; nothing is left."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_channel import until
from tests.engine.test_launch import (
    DEADLINE_S,
    ENDLESS,
    PARAMS,
    process,
    submit,
    wait_for_the_end,
)
from tests.gateway.serving import wait_until
from whalepod.server import engine_launcher
from whalepod.server.channel import EngineChannel
from whalepod.server.cluster.local_ranks import LocalRanks
from whalepod.server.cluster.node_plan import plan_of_one
from whalepod.server.cluster.rank_group import RankGroup
from whalepod.server.config import EngineConfig, ModelSource, ParallelConfig
from whalepod.server.engine_launcher import EngineProcess, end_all, private_folder
from whalepod.server.errors import EngineLost, StartupError
from whalepod.server.journal_file import JournalFile, open_journal
from whalepod.server.messages import Submit


async def count_tokens(channel: EngineChannel, request: Submit) -> int:
    return sum([len(output.token_ids) async for output in channel.submit(request)])


async def kill_and_wait(engine: EngineProcess, channel: EngineChannel) -> None:
    """Kill the engine; return when the next one can serve."""
    pid = engine.pid
    os.kill(pid, signal.SIGKILL)
    await until(lambda: channel.is_lost or engine.pid != pid)
    await until(lambda: not channel.is_lost)
    assert engine.pid != pid


def test_A6_a_single_engine_that_dies_is_started_again(tmp_path: Path) -> None:
    async def scenario(engine: EngineProcess) -> None:
        async with asyncio.timeout(4 * DEADLINE_S), engine.restarting_channel() as channel:
            outputs = channel.submit(submit(ENDLESS))
            await anext(outputs)
            await kill_and_wait(engine, channel)
            with pytest.raises(EngineLost, match="SIGKILL"):
                async for _ in outputs:
                    pass
            assert channel.failure is None
            assert await count_tokens(channel, submit(PARAMS)) == PARAMS.max_tokens
            await kill_and_wait(engine, channel)
            assert (await channel.ping(5.0)).num_running == 0

    with process("slow") as engine:
        asyncio.run(scenario(engine))


def test_A6_an_engine_that_dies_too_often_is_lost_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_launcher, "MAX_RESTARTS", 1)

    async def scenario(engine: EngineProcess) -> None:
        async with asyncio.timeout(4 * DEADLINE_S), engine.restarting_channel() as channel:
            await kill_and_wait(engine, channel)
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda: channel.failure is not None)
            assert channel.failure == "the engine cannot be replaced: it was lost 2 times in 600 s"
            with pytest.raises(EngineLost):
                await channel.ping(5.0)

    with process() as engine:
        asyncio.run(scenario(engine))


def test_A4_each_life_of_an_engine_records_to_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = []
    encode = engine_launcher.encode_value

    def encode_and_note(config: Any) -> bytes:
        records.append(config.record)
        return encode(config)

    monkeypatch.setattr(engine_launcher, "encode_value", encode_and_note)
    engine = process()
    engine._config = replace(engine._config, record="F")
    with engine:
        engine.restart()
    assert records == ["F", "F.1"]


class FullDisk(io.RawIOBase):
    """Takes `room` bytes."""

    def __init__(self, room: int) -> None:
        self.kept = b""
        self._room = room

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(self.kept) + len(data) > self._room:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.kept += bytes(data)
        return len(data)


def test_A5_a_recording_that_fails_ends_and_nothing_else_does(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    disk = FullDisk(100_000)
    file = JournalFile(disk)
    for _ in range(1000):
        file.write(b"x" * 1000)
        file.flush()
    file.close()
    assert disk.kept == b"x" * 100_000
    assert caplog.text.count("the recording stops here, serving goes on: No space left") == 1

    journal = open_journal(str(tmp_path / "whole"))
    assert journal is not None
    journal.write(b"frame")
    journal.close()
    assert (tmp_path / "whole").read_bytes() == b"frame"
    with pytest.raises(StartupError, match="File exists"):
        open_journal(str(tmp_path / "whole"))


def test_A3_the_folder_of_sockets_is_locked_against_cleaners() -> None:
    """systemd-tmpfiles takes an exclusive lock before it removes an old folder, or leaves it."""
    with private_folder() as folder:
        cleaner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(cleaner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(cleaner)
    assert not folder.exists()


@dataclass
class StubbornProcess:
    """Ends by SIGKILL only; a wait passes at once, and `clock` says how long it took."""

    clock: list[float]
    waits: list[float] = field(default_factory=list)

    stdin = None

    def terminate(self) -> None: ...

    def kill(self) -> None:
        self.waits.append(0.0)

    def wait(self, timeout: float | None = None) -> None:
        if timeout is not None:
            self.clock[0] += timeout
            self.waits.append(timeout)
            raise subprocess.TimeoutExpired("stubborn", timeout)


def test_C2_processes_that_do_not_listen_share_one_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [50.0]
    monkeypatch.setattr(engine_launcher.time, "monotonic", lambda: clock[0])
    processes = [StubbornProcess(clock) for _ in range(8)]
    end_all(processes, 10.0)  # type: ignore[arg-type]
    assert [sum(one.waits) for one in processes] == [10.0, *[0.0] * 7]
    assert all(one.waits[-1] == 0.0 for one in processes), "each is killed in the end"


@pytest.fixture
def long_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_C4_a_long_folder_for_sockets_is_one_sentence(long_folder: Path) -> None:
    group = RankGroup(EngineConfig(parallel=ParallelConfig(expert_parallel_size=2)))
    for launcher, name in ((process(), "the engine"), (group, "rank 0")):
        with pytest.raises(StartupError, match=f"{name} cannot be reached at ipc:.* too long"):
            launcher.__enter__()
        assert list(long_folder.iterdir()) == []


def test_C8_a_folder_that_cannot_be_made_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(StartupError, match=r"absent \(No such file or directory\): set TMPDIR"):
        process().__enter__()


def test_C5_a_launcher_that_dies_while_its_engine_is_stopped_leaves_nothing(
    tmp_path: Path,
) -> None:
    """The kernel sends SIGHUP to a stopped process whose launcher's session has gone."""
    launcher = (
        "import os, signal; from tests.engine.test_launch import process\n"
        "e = process('slow'); e.__enter__(); os.kill(e.pid, signal.SIGSTOP)\n"
        "print(e.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    parent = subprocess.run(
        [sys.executable, "-c", launcher],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        start_new_session=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )
    assert parent.returncode == -signal.SIGKILL
    wait_for_the_end(int(parent.stdout), DEADLINE_S)
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_C6_a_rank_is_killed_without_a_wait_until_its_memory_is_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gateway's event loop kills it, and all streams would stand still."""
    config = EngineConfig(source=ModelSource(model="slow"))
    with LocalRanks(config, plan_of_one(1), "shm", module="tests.engine.idle_process") as local:
        local.start(0, "ipc:///dev/null")
        (child,) = local._processes.values()
        monkeypatch.setattr(child, "wait", None)
        local.kill(0)
        monkeypatch.undo()
        assert child.wait(DEADLINE_S) == -signal.SIGKILL


def test_a_spare_process_becomes_the_next_rank_and_a_dead_one_does_not() -> None:
    config = EngineConfig(source=ModelSource(model="slow"))
    with LocalRanks(config, plan_of_one(1), "shm", module="tests.engine.idle_process") as local:
        local.prepare_spare()
        spare = local._spare
        assert spare is not None
        local.start(0, "ipc:///dev/null")
        assert local.pid(0) == spare.pid
        local.stop(0)
        local.prepare_spare()
        dead = local._spare
        assert dead is not None
        dead.kill()
        dead.wait(DEADLINE_S)
        local.start(0, "ipc:///dev/null")
        assert local.exit_reason(0) is None
        assert local.pid(0) != dead.pid
