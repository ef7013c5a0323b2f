"""Ranks of several hosts without GPUs, over torch.distributed's gloo (TCP).

Gloo has messages, not memory: a put is a message that a thread of the receiver, one per peer,
writes into the heap. Messages between two ranks arrive in their order, so a fence has nothing to
do. `quiet` returns when sources can be used again; data is then on its way, ahead of anything that
this rank sends to the same peer later, and nobody can tell that from delivered.

A peer whose connection breaks, or does not take data for `patience_ms`, is lost: what is sent to it
is dropped, its signals do not come, and a wait for them ends at its deadline. It can come back in a
new group only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import timedelta
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import Tensor

from whalepod.ep_comm.transport.interface import SignalWait, Topology, barrier_by_signals

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
    store: dist.Store, rank: int, num_ranks: int, *, address: str | None = None
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
    return dist.ProcessGroupGloo(store, rank, num_ranks, options)  # type: ignore[no-any-return]


class GlooTransport:
    """One rank of a gloo group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        heap_bytes: int,
        *,
        ranks_per_node: int | None = None,
        patience_ms: float = 30_000.0,
    ) -> None:
        self.rank = group.rank()
        self.topology = Topology(group.size(), ranks_per_node or group.size())
        self.heap = torch.zeros(8 * -(-heap_bytes // 8), dtype=torch.uint8)
        self._group = group
        self._patience = timedelta(milliseconds=patience_ms)
        self._words = self.heap.view(torch.int64).numpy()
        self._changed = threading.Condition()
        self._sends: deque[tuple[int, dist.Work, Tensor]] = deque()
        self._num_barriers = 0
        peers = [rank for rank in range(group.size()) if rank != self.rank]
        self._lost: set[int] = set()
        self._receivers = [
            threading.Thread(target=self._receive_from, args=(peer,), daemon=True) for peer in peers
        ]
        for receiver in self._receivers:
            receiver.start()

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

    def put_signal_nbi(
        self, offset: int, source: Tensor, signal_offset: int, value: int, rank: int
    ) -> None:
        self.put_nbi(offset, source, rank)
        self.signal_op(signal_offset, value, rank)

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
        while self._sends:
            rank, work, _ = self._sends.popleft()
            try:
                if rank not in self._lost:
                    work.wait(self._patience)
            except RuntimeError:  # the connection broke, or gloo gave it up after our patience
                self._lost.add(rank)

    def barrier(self, deadline_ms: float) -> tuple[int, ...]:
        self._num_barriers += 1
        return barrier_by_signals(self, self._num_barriers, deadline_ms)

    def peer_view(self, rank: int) -> Tensor | None:
        """Return this rank's own heap; other ranks' memory is elsewhere."""
        return self.heap if rank == self.rank else None

    def close(self) -> None:
        """Say goodbye, and wait a little for the peers to do the same."""
        for rank in range(self.topology.num_ranks):
            if rank != self.rank:
                self._send_header(rank, _Kind.GOODBYE, 0, 0)
        self.quiet()
        deadline_ms = self.now_ms() + _GOODBYE_MS
        for receiver in self._receivers:
            receiver.join(max(deadline_ms - self.now_ms(), 0.0) / 1e3)

    def _send_header(self, rank: int, kind: _Kind, offset: int, value: int) -> None:
        self._send(rank, torch.tensor([kind, offset, value], dtype=torch.int64))

    def _send(self, rank: int, message: Tensor) -> None:
        if rank in self._lost:
            return
        try:
            self._sends.append((rank, self._group.send([message], rank, 0), message))
        except RuntimeError:  # the connection is broken
            self._lost.add(rank)

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
                else:
                    self._group.recv([self.heap[offset : offset + value]], peer, 0).wait()
        except RuntimeError:  # the connection broke: the peer is dead, and waits will say so
            self._lost.add(peer)
