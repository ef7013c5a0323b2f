"""Machines that serve together: two launches on loopback, or one in each of two namespaces."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.end_to_end.asking import Answer, ask_all
from tests.gateway.serving import wait_until

PROGRAM = "import sys; from whalepod.tools.cli import main; sys.exit(main())"
START_S = 600.0
STOP_S = 120.0


@dataclass(frozen=True)
class Machine:
    """prefix: of a command that is to run there; address: where others reach it."""

    address: str
    prefix: tuple[str, ...] = ()


@dataclass
class Launch:
    """One started command, and what it has said so far."""

    process: subprocess.Popen[str]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def text(self) -> str:
        return "".join(self.lines)

    def wait(self) -> int:
        """Return the exit code."""
        code = self.process.wait(STOP_S)
        self._reader.join(10.0)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)


def whalepod(command: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PROGRAM, command, *arguments)


def torchrun(
    node: int, machines: Sequence[Machine], port: int, ranks_per_node: int, *arguments: str
) -> tuple[str, ...]:
    """Return torchrun's command line for one machine."""
    return (
        sys.executable, "-m", "torch.distributed.run",
        "--nnodes", str(len(machines)), "--nproc-per-node", str(ranks_per_node),
        "--node-rank", str(node), "--master-addr", machines[0].address,
        "--master-port", str(port), "--no-python", *whalepod("serve", *arguments),
    )  # fmt: skip


@contextmanager
def launch(machine: Machine, *command: str) -> Iterator[Launch]:
    """Start a command; whatever happens, it does not outlive the block."""
    process = subprocess.Popen(
        [*machine.prefix, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    launched = Launch(process)
    try:
        yield launched
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        launched.wait()


def wait_for_address(launches: Sequence[Launch]) -> str:
    """Return the server's address once it is printed; fail with all output if somebody ends."""

    def found() -> re.Match[str] | None:
        ended = [one for one in launches if one.process.poll() is not None]
        assert not ended, "\n---\n".join(one.text for one in launches)
        return re.search(r"url +(http://[\d.]+:\d+)", launches[0].text)

    wait_until(found, START_S)
    match = found()
    assert match is not None
    return match[1]


def ask_from(machine: Machine, address: str, bodies: list[dict[str, Any]]) -> list[Answer]:
    """Ask all at once, from one of the machines."""
    if not machine.prefix:
        return asyncio.run(ask_all(address, bodies))
    command = [*machine.prefix, sys.executable, "-m", "tests.end_to_end.asking", address]
    done = subprocess.run(
        command, input=json.dumps(bodies), capture_output=True, text=True, timeout=START_S,
        check=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    answers: list[Answer] = [tuple(one) for one in json.loads(done.stdout)]
    return answers


def ranks_of(launcher: int, module: str = "whalepod.server.cluster.rank_process") -> list[int]:
    """Return the process ids of all ranks below a launcher (or of what runs another module)."""
    found, below = [], [launcher]
    while below:
        pid = below.pop()
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                below += [int(child) for child in file.read().split()]
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            if module.encode() in file.read():
                found.append(pid)
    return found


@contextmanager
def namespaces() -> Iterator[list[Machine]]:
    """Make two network namespaces with a wire between them. Needs root and iproute2."""
    machines, names = [], [f"whalepod-{os.getpid()}-{i}" for i in range(2)]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)

    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
        wires = [f"wp{os.getpid() % 100_000}{side}" for side in "ab"]
        ip("link", "add", wires[0], "type", "veth", "peer", "name", wires[1])
        for i, (name, wire) in enumerate(zip(names, wires, strict=True)):
            address = f"10.213.7.{i + 1}"
            ip("link", "set", wire, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", wire)
            ip("-n", name, "link", "set", wire, "up")
            ip("-n", name, "link", "set", "lo", "up")
            machines.append(Machine(address, ("ip", "netns", "exec", name)))
        yield machines
