"""What the launchers of a group share: a few keys in torch's TCPStore, and never a long wait.

The store is torch's; here each call gets a deadline, and an error that names the store. Without the
process that holds it (machine 0's launcher, or torchrun's agent) the group does not go on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from whalepod.server.cluster.deadline import Deadline, call_within
from whalepod.server.cluster.node_plan import NodePlan
from whalepod.server.errors import GroupLost, StartupError

T = TypeVar("T")
CALL_TIMEOUT_S = 10.0
"""A store that does not answer for this long is lost."""
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5


class StoreLost(GroupLost):
    """The store does not answer: its machine, or the way to it, is gone."""


class GroupStore:
    """Values by key, on the machine where the store runs. Any thread may call.

    where    "address:port", for people
    address  of this machine on the way to the store: where others reach it
    """

    def __init__(
        self, raw: Store, where: str, address: str, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> None:
        self._raw = raw
        self.where = where
        self.address = address
        self._timeout_s = timeout_s
        self._lost: str | None = None

    def get(self, key: str) -> str | None:
        """Return the value; None: it is not set."""
        return self._call(lambda: self._raw.get(key) if self._raw.check([key]) else None)

    def set(self, key: str, value: str) -> None:
        self._call(lambda: self._raw.set(key, value))

    def claim(self, key: str, value: str) -> str:
        """Set the value if it is not set; return what it is."""
        return self._call(lambda: self._raw.compare_set(key, "", value)) or ""

    def _call(self, function: Callable[[], bytes | None]) -> str | None:
        if self._lost is None:
            try:
                found = call_within(self._timeout_s, function)
                return None if found is None else found.decode()
            except TimeoutError:
                self._lost = f"the store at {self.where} has not answered for {self._timeout_s:g} s"
            except RuntimeError as error:  # torch's, of several kinds
                self._lost = f"the store at {self.where} is gone ({_first_line(error)})"
        raise StoreLost(self._lost)


def open_store(plan: NodePlan, deadline: Deadline) -> GroupStore:
    """Open the store if it is this launcher's, else wait until it answers. Raises StartupError."""
    where = f"{plan.address}:{plan.port}"
    if plan.hosts_store:
        listener = _listen(plan)
        address = str(listener.getsockname()[0])
        raw = _connect(plan, CALL_TIMEOUT_S, address, listener.detach())
    else:
        address = _wait_for_listener(plan, deadline)
        raw = connect_library(plan)
    return GroupStore(raw, where, address)


def connect_library(plan: NodePlan, timeout_s: float = CALL_TIMEOUT_S) -> Store:
    """Return a connection for a library that brings its own part of a group together over it.

    It has to be one of its own: a library that waits for a key holds the connection meanwhile.
    Raises StartupError.
    """
    try:
        return _connect(plan, timeout_s, plan.address)
    except RuntimeError as error:
        raise StartupError(
            f"the store at {plan.address}:{plan.port} cannot be used ({_first_line(error)})"
        ) from error


def _connect(plan: NodePlan, timeout_s: float, address: str, listener: int | None = None) -> Store:
    """Return a client; with a listening descriptor the server as well."""
    raw = TCPStore(
        address,
        plan.port,
        None,
        listener is not None,
        timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    return PrefixStore(f"whalepod/{plan.attempt}", raw)


def _listen(plan: NodePlan) -> socket.socket:
    """Listen at the one address that the others know, and nowhere else."""
    host, port = plan.address, plan.port
    try:
        family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family)
    except OSError as error:
        raise StartupError(
            f"machine 0 cannot listen at {host}:{port} for the others ({error.strerror or error}): "
            "choose another --master-port, or an address of this machine, on all machines"
        ) from error


def _wait_for_listener(plan: NodePlan, deadline: Deadline) -> str:
    """Return this machine's address on the way to the store, once a process listens there."""
    where, reason = f"{plan.address}:{plan.port}", ""
    while deadline.allows(f"machine 0 at {where}{reason}"):
        try:
            with socket.create_connection((plan.address, plan.port), CONNECT_TIMEOUT_S) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            reason = f" ({error.strerror or error})"
        time.sleep(RETRY_S)
    raise StartupError(
        f"nothing answers at {where} within {deadline.timeout_s:g} s{reason}: is machine 0 "
        "started, and is this its address?"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
