"""The engine in a process of its own: started, used, killed, refused."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.fakes import expected_answer
from whalepod.models.synthetic import synthesize
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.server.config import DeviceConfig, EngineConfig, ModelSource
from whalepod.server.engine.local import Engine
from whalepod.server.engine_launcher import EngineProcess
from whalepod.server.errors import EngineLost, StartupError
from whalepod.server.messages import Submit

PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
PROMPT = (3, 1, 4)


def process(behaviour: str = "", start_timeout_s: float = 60.0) -> EngineProcess:
    return EngineProcess(
        EngineConfig(source=ModelSource(model=behaviour)),
        start_timeout_s=start_timeout_s,
        stop_grace_s=5.0,
        module="tests.engine.fake_engine_process",
    )


@pytest.fixture(autouse=True)
def folder_of_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep sockets apart, so that a test can see that none is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


DEADLINE_S = 60.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_the_end(pid: int, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still lives after {timeout_s} s"
        time.sleep(0.02)  # a poll with a deadline


def submit(params: SamplingParams) -> Submit:
    return Submit(request_id="a", prompt_token_ids=PROMPT, params=params)


def test_an_engine_process_answers_and_leaves_nothing_behind(
    folder_of_sockets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = folder_of_sockets / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "torch.py").write_text("raise ImportError('shadowed by the working directory')")
    monkeypatch.chdir(elsewhere)

    async def ask(engine: EngineProcess) -> list[int]:
        async with engine.channel() as channel:
            assert (await channel.ping(5.0)).num_running == 0
            outputs = [output async for output in channel.submit(submit(PARAMS))]
        return [token_id for output in outputs for token_id in output.token_ids]

    with process() as engine:
        (folder,) = folder_of_sockets.glob("whalepod-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert engine.info.model_type == "fake"
        assert asyncio.run(ask(engine)) == expected_answer(list(PROMPT), PARAMS)
        pid = engine.pid

    assert not is_alive(pid)
    assert list(folder_of_sockets.iterdir()) == [elsewhere]


@pytest.mark.parametrize(
    ("behaviour", "says"),
    [
        ("refuses", "there is no such checkpoint"),
        ("breaks", "RuntimeError: a bug"),
        ("dies", "exit code 7 before it was ready"),
    ],
)
def test_a_start_that_fails_is_one_sentence(
    behaviour: str, says: str, folder_of_sockets: Path
) -> None:
    with pytest.raises(StartupError, match=says), process(behaviour):
        pass

    assert list(folder_of_sockets.iterdir()) == []


def test_a_start_that_hangs_ends_at_its_deadline(folder_of_sockets: Path) -> None:
    engine = EngineProcess(
        EngineConfig(source=ModelSource(model="hangs")),
        start_timeout_s=0.5,
        stop_grace_s=0.5,
        module="tests.engine.fake_engine_process",
    )

    with pytest.raises(StartupError, match="not ready after"), engine:
        pass

    assert not is_alive(engine.pid)
    assert list(folder_of_sockets.iterdir()) == []


def test_a_bug_in_the_loop_fails_requests_with_its_own_words() -> None:
    async def scenario(engine: EngineProcess) -> None:
        async with engine.channel() as channel:
            with pytest.raises(EngineLost, match="RuntimeError: a bug in the loop"):
                await read_to_the_end(channel.submit(submit(ENDLESS)))

    with process("crashes") as engine:
        asyncio.run(scenario(engine))
        wait_for_exit(engine)
        assert engine.exit_reason() == "the engine process ended with exit code 1"


def wait_for_exit(engine: EngineProcess, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while engine.exit_reason() is None:
        assert time.monotonic() < deadline, f"the engine still lives after {timeout_s} s"
        time.sleep(0.02)  # a poll with a deadline


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kernels": "reference", "batch_invariant": True}, "drop one of the two"),
        ({"num_threads": -1}, "num_threads must be at least 0, got -1"),
        ({"kv_cache_memory_bytes": -5}, "kv_cache_memory_bytes .* got -5"),
        ({"absorbed_max_query_tokens": -1}, "absorbed_max_query_tokens .* got -1"),
    ],
)
def test_a_device_that_cannot_be_is_refused_at_the_door(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DeviceConfig(**fields)


def test_a_real_engine_answers_as_in_process(tmp_path: Path) -> None:
    folder = str(synthesize("v3-nano", tmp_path / "nano"))
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=8, ignore_eos=True)
    device = DeviceConfig(batch_invariant=True, num_threads=1)
    source = ModelSource(model=folder, dtype="fp32")

    async def ask(engine: EngineProcess) -> list[int]:
        async with engine.channel() as channel:
            outputs = [output async for output in channel.submit(submit(params))]
        return [token_id for output in outputs for token_id in output.token_ids]

    with EngineProcess(EngineConfig(source=source, device=device)) as engine:
        assert engine.info.weights_bytes > 0
        answer = asyncio.run(ask(engine))

    with Engine(folder, dtype="fp32", batch_invariant=True, num_threads=1) as local:
        (generation,) = local.generate([list(PROMPT)], params)
    assert tuple(answer) == generation.token_ids


def test_a_checkpoint_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    folder = synthesize("v3-nano", tmp_path / "nano")
    (file,) = folder.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-100])
    engine = EngineProcess(EngineConfig(source=ModelSource(model=str(folder), dtype="fp32")))

    with pytest.raises(StartupError, match=file.name), engine:
        pass


async def read_to_the_end(outputs: AsyncIterator[SequenceOutput]) -> None:
    async for _ in outputs:
        pass


def test_killing_the_engine_fails_its_requests() -> None:
    async def scenario(engine: EngineProcess) -> None:
        async with engine.channel() as channel:
            outputs = channel.submit(submit(ENDLESS))
            await anext(outputs)
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(EngineLost, match="SIGKILL"):
                async with asyncio.timeout(DEADLINE_S):
                    await read_to_the_end(outputs)
            with pytest.raises(EngineLost, match="SIGKILL"):
                await channel.ping(5.0)

    with process("slow") as engine:
        asyncio.run(scenario(engine))


def test_an_idle_engine_uses_no_cpu() -> None:
    with process() as engine:
        before = cpu_seconds(engine.pid)
        time.sleep(1.0)  # the interval that is measured
        assert cpu_seconds(engine.pid) - before <= 0.05


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of all threads of a process so far, finer than the ticks of /proc."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux: the clock of another process


def test_an_engine_ends_with_its_launcher(folder_of_sockets: Path) -> None:
    """The launcher is killed: it cannot clean up, so the engine does."""
    launcher = (
        "import sys; from whalepod.server.engine_launcher import EngineProcess\n"
        "from whalepod.server.config import EngineConfig\n"
        "e = EngineProcess(EngineConfig(), module='tests.engine.fake_engine_process')\n"
        "e.__enter__(); print(e.pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", launcher],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ
        | {"PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(folder_of_sockets)},
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()

    wait_for_the_end(pid)
    assert list(folder_of_sockets.iterdir()) == []
