"""Ranks of several hosts without GPUs, over torch.distributed's gloo (TCP).

Gloo has messages, not memory: a put is a message that a thread of the receiver, one per peer,
writes into the heap. Messages between two ranks arrive in their order, so a fence has nothing to
do. `quiet` returns when sources can be used again; data is then on its way, ahead of anything that
this rank sends to the same peer later, and no rank can tell that from delivered.

A peer whose connection breaks, or that does not take data for `patience_ms`, is lost: what is sent
to it is dropped, its signals do not come, and a wait for them ends at its deadline. It can come
back in a new group only. (A stopped peer takes no data: patience must be shorter than the deadlines
of calls. Gloo's own time-outs are not used: they break the connections to all peers.)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from queue import SimpleQueue
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from whalepod.ep_comm.transport.interface import (
    MappedMemory,
    SignalWait,
    Topology,
    barrier_by_signals,
)

_FOREVER = timedelta(days=365)
"""A receiver waits for its peer's next message as long as the peer lives."""

_GOODBYE_MS = 5_000.0


class _Kind(IntEnum):
    PUT = 1
    SIGNAL = 2
    GOODBYE = 3


_HEADER_WORDS = 3
"""int64 kind, offset, and size of a put or value of a signal."""


def connect(
    store: Store, rank: int, num_ranks: int, *, address: str | None = None
) -> dist.ProcessGroup:
    """Make a gloo group of its own, not the process's default one.

    address  of the network interface to use; None: that of the host's name
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _FOREVER
    device = (
        dist.ProcessGroupGloo.create_default_device()
        if address is None
        else dist.ProcessGroupGloo.create_device(hostname=address)
    )
    options._devices = [device]
    group: Any = dist.ProcessGroupGloo(store, rank, num_ranks, options)
    return cast(dist.ProcessGroup, group)


@dataclass(slots=True)
class _Sends:
    """What was sent to one peer and is not complete; messages are kept alive."""

    queue: SimpleQueue[tuple[dist.Work, Tensor] | None] = field(default_factory=SimpleQueue)
    num_open: int = 0


class GlooTransport:
    """One rank of a gloo group.

    on_arrival  called by a receiving thread when a peer has set a signal word
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        heap_bytes: int,
        *,
        ranks_per_node: int | None = None,
        patience_ms: float = 5_000.0,
        on_arrival: Callable[[], None] = lambda: None,
    ) -> None:
        self.rank = group.rank()
        self._on_arrival = on_arrival
        self.topology = Topology(group.size(), ranks_per_node or group.size())
        self.heap = torch.zeros(8 * -(-heap_bytes // 8), dtype=torch.uint8)
        self._group = group
        self.patience_ms = patience_ms
        self._words = self.heap.view(torch.int64).numpy()
        self._changed = threading.Condition()
        self._num_barriers = 0
        self._lost: set[int] = set()
        peers = [rank for rank in range(group.size()) if rank != self.rank]
        self._sends = {rank: _Sends() for rank in peers}
        self._receivers = [_start(self._receive_from, peer) for peer in peers]
        self._senders = [_start(self._complete_sends_to, peer) for peer in peers]

    @property
    def lost(self) -> tuple[int, ...]:
        """Return the peers whose connections are broken."""
        return tuple(sorted(self._lost))

    def now_ms(self) -> float:
        return time.monotonic() * 1e3

    def put_nbi(self, offset: int, source: Tensor, rank: int) -> None:
        size = source.numel()
        if rank == self.rank:
            self.heap[offset : offset + size] = source
        elif size:
            self._send_header(rank, _Kind.PUT, offset, size)
            self._send(rank, source)

    def signal_op(self, signal_offset: int, value: int, rank: int) -> None:
        if rank == self.rank:
            self._set_word(signal_offset, value)
        else:
            self._send_header(rank, _Kind.SIGNAL, signal_offset, value)

    def signal_fetch(self, signal_offset: int) -> int:
        return int(self._words[signal_offset // 8])

    def signal_wait(self, signal_offset: int, at_least: int, deadline_ms: float) -> SignalWait:
        words, index = self._words, signal_offset // 8
        with self._changed:
            while words[index] < at_least and (left_ms := deadline_ms - self.now_ms()) > 0:
                self._changed.wait(left_ms / 1e3)
        value = int(words[index])
        return SignalWait(value >= at_least, value)

    def fence(self, rank: int) -> None:
        """Do nothing: messages to one rank arrive in their order."""

    def quiet(self) -> None:
        deadline_ms = self.now_ms() + self.patience_ms
        with self._changed:
            for rank, sends in self._sends.items():
                while sends.num_open and rank not in self._lost:
                    left_ms = deadline_ms - self.now_ms()
                    if left_ms <= 0:
                        self._lost.add(rank)
                    else:
                        self._changed.wait(left_ms / 1e3)

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        self._num_barriers += 1
        return barrier_by_signals(self, self._num_barriers, deadline_ms)

    @property
    def mapped(self) -> MappedMemory | None:
        """Return None: rows go through the transport."""
        return None

    def peer_view(self, rank: int) -> Tensor | None:
        """Return this rank's own heap; other ranks' memory is elsewhere."""
        return self.heap if rank == self.rank else None

    def close(self) -> None:
        """Say goodbye, and wait a little for the peers to do the same."""
        for rank in self._sends:
            self._send_header(rank, _Kind.GOODBYE, 0, 0)
        self.quiet()
        for sends in self._sends.values():
            sends.queue.put(None)
        deadline_ms = self.now_ms() + _GOODBYE_MS
        for thread in [*self._senders, *self._receivers]:
            thread.join(max(deadline_ms - self.now_ms(), 0.0) / 1e3)

    def _send_header(self, rank: int, kind: _Kind, offset: int, value: int) -> None:
        self._send(rank, torch.tensor([kind, offset, value], dtype=torch.int64))

    def _send(self, rank: int, message: Tensor) -> None:
        if rank in self._lost:
            return
        try:
            work = self._group.send([message], rank, 0)
        except RuntimeError:  # the connection is broken
            self._lose(rank)
            return
        with self._changed:
            self._sends[rank].num_open += 1
        self._sends[rank].queue.put((work, message))

    def _lose(self, rank: int) -> None:
        with self._changed:
            self._lost.add(rank)
            self._changed.notify_all()

    def _complete_sends_to(self, peer: int) -> None:
        """Wait for what was sent to a peer, one by one; a stopped peer holds up no other."""
        sends = self._sends[peer]
        try:
            while (item := sends.queue.get()) is not None:
                item[0].wait()
                with self._changed:
                    sends.num_open -= 1
                    self._changed.notify_all()
        except RuntimeError:  # the connection broke
            self._lose(peer)

    def _set_word(self, offset: int, value: int) -> None:
        with self._changed:
            self._words[offset // 8] = value
            self._changed.notify_all()

    def _receive_from(self, peer: int) -> None:
        """Do what a peer's messages say, until it leaves."""
        header = torch.empty(_HEADER_WORDS, dtype=torch.int64)
        try:
            while True:
                self._group.recv([header], peer, 0).wait()
                kind, offset, value = header.tolist()
                if kind == _Kind.GOODBYE:
                    return
                if kind == _Kind.SIGNAL:
                    self._set_word(offset, value)
                    self._on_arrival()
                else:
                    self._group.recv([self.heap[offset : offset + value]], peer, 0).wait()
        except RuntimeError:  # the connection broke: the peer is dead, and waits will say so
            self._lose(peer)


def _start(target: Callable[[int], None], peer: int) -> threading.Thread:
    thread = threading.Thread(target=target, args=(peer,), daemon=True)
    thread.start()
    return thread
