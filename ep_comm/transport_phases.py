"""The phases of an exchange over a transport: what they mean, on every transport.

Ranks that are missing, and calls that are given up, are found here. With several nodes a token
crosses to each node once, to the rank with this rank's place there, which passes it on to the ranks
that the token's choices name. Results come back the same way, added up on the node first.

Suffix letters as in `whalepod.ep_comm.layout`, J ranks of a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.by_expert import ByExpert
from whalepod.ep_comm.by_token import ByToken
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions
from whalepod.ep_comm.dispatched import Handle
from whalepod.ep_comm.group import Arrivals, CallStatus, Group
from whalepod.ep_comm.routes import Routes
from whalepod.ep_comm.row_kernels.interface import RowKernels
from whalepod.ep_comm.slots import SendBuffer, Target, TransferId

DISPATCH, COMBINE = "dispatch", "combine"
"""What statuses call the two operations."""


class TransportPhases:
    """Moves chunks between this rank and the others; what belongs to a call is in its handle."""

    def __init__(
        self,
        group: Group,
        config: ExchangeConfig,
        regions: ExchangeRegions,
        send_buffer: SendBuffer,
        kernels: RowKernels,
        *,
        poison_unused: bool,
    ) -> None:
        self._group = group
        self._config = config
        self._regions = regions
        self._send_buffer = send_buffer
        self._kernels = kernels
        self._routes = Routes(group, config, regions)
        self._by_token = ByToken(group, config, regions, kernels, self._routes)
        self.store: ByExpert | ByToken = self._by_token
        if config.is_by_expert:
            self.store = ByExpert(group, config, regions, kernels, poison_unused=poison_unused)

    @property
    def forwards(self) -> bool:
        """Return whether this rank passes on what goes between other nodes and its own."""
        return bool(self._routes.partners)

    # -- dispatch ------------------------------------------------------------------------------

    def send(self, transfer: TransferId, handle: Handle) -> None:
        """Send a chunk's tokens to the neighbours directly, and once to each other node."""
        assert handle.is_in_TR is not None
        assert handle.rows is not None
        self._send_buffer.begin()
        first = transfer.chunk * self._config.max_records
        is_in_TR = handle.is_in_TR[first : first + self._config.max_records]
        suspects = self._group.suspects
        ways = [way for way in self._routes.of_tokens(is_in_TR) if way[0].rank not in suspects]
        blocks = [self._send_buffer.open(target, transfer) for target, _ in ways]
        is_for_TD = torch.stack([is_for_T for _, is_for_T in ways], dim=1)
        counts = self._kernels.pack(
            self._config.dispatch_format, handle.rows, is_for_TD, blocks, first
        )
        for (target, _), block, count in zip(ways, blocks, counts, strict=True):
            self._send_buffer.send(target, transfer, block, count)

    def receive(
        self, transfer: TransferId, handle: Handle, deadline_ms: float, grace_ms: float
    ) -> CallStatus:
        """Pass on what other nodes sent, then store this rank's rows of a chunk.

        grace_ms  the last wait is longer where ranks forward, so that it is the forwarder which
                  reports a dead source, and not the forwarder that is taken for dead
        """
        arrivals = Arrivals(self._group, DISPATCH, transfer.epoch)
        if self.forwards:
            self._forward(transfer, handle, arrivals, deadline_ms)
            deadline_ms += grace_ms
        counts = arrivals.wait(self._routes.expected_rows(transfer), deadline_ms)
        self.store.store(handle, transfer, counts)
        arrivals.check_unchanged()
        handle.num_received += 1
        return arrivals.status()

    def _forward(
        self, transfer: TransferId, handle: Handle, arrivals: Arrivals, deadline_ms: float
    ) -> None:
        """Pass on what came from the ranks with this rank's place on the other nodes."""
        counts = arrivals.wait(self._routes.expected_to_forward(transfer), deadline_ms)
        self._send_buffer.begin()
        slots, heap = self._regions.forwarded, self._group.transport.heap
        assert slots is not None
        forwarded = {}
        for v, source in self._routes.partners.items():
            if source in counts:
                records = slots.received(heap, transfer, v, counts[source])
                forwarded[v] = self._pass_on(transfer, source, records)
            else:
                for rank in self._routes.neighbours:
                    target = self._routes.to_neighbour(rank, source)
                    self._send_buffer.give_up(target, transfer)
        handle.forwarded.append(forwarded)

    def _pass_on(self, transfer: TransferId, source: int, records: Tensor) -> Tensor:
        """Send each record to the neighbours that its choices name; returns `[n, J]` bool."""
        ids_nK = self._config.dispatch_format.views(records).ids_K.long()
        owners_nK = layout.owner_of(ids_nK, self._config.num_experts, self._config.num_ranks)
        ranks_J = torch.tensor(self._routes.neighbours)
        hits_nJ = (owners_nK[:, None, :] == ranks_J[None, :, None]).any(dim=2)
        for j, rank in enumerate(self._routes.neighbours):
            if rank in self._group.suspects:
                continue
            chosen = hits_nJ[:, j].nonzero().squeeze(1)
            target = self._routes.to_neighbour(rank, source)
            block = self._send_buffer.open(target, transfer)
            torch.index_select(records, 0, chosen, out=block[: len(chosen)])
            self._send_buffer.send(target, transfer, block, len(chosen))
        return hits_nJ

    # -- combine -------------------------------------------------------------------------------

    def send_back(self, transfer: TransferId, handle: Handle, y: Tensor) -> None:
        """Send what the experts made of a chunk's rows to their sources, or to the rank that adds
        up for them."""
        self._send_buffer.begin()
        for source in range(self._config.num_ranks):
            target = self._routes.of_results(source)
            if target.rank in self._group.suspects:
                continue
            block, values_SH = self._open_values(target, transfer)
            count = self.store.write_back(handle, transfer.chunk, source, y, values_SH)
            self._send_buffer.send(target, transfer, block, count)

    def collect(
        self, transfer: TransferId, handle: Handle, deadline_ms: float, grace_ms: float
    ) -> CallStatus:
        """Add up for other nodes, then add up a chunk's results for this rank's tokens."""
        arrivals = Arrivals(self._group, COMBINE, transfer.epoch)
        if self.forwards:
            self._reduce(transfer, handle, arrivals, deadline_ms)
            deadline_ms += grace_ms
        counts = arrivals.wait(self._routes.expected_results(transfer), deadline_ms)
        self.store.add_up(handle, transfer, counts)
        arrivals.check_unchanged()
        return arrivals.status()

    def _reduce(
        self, transfer: TransferId, handle: Handle, arrivals: Arrivals, deadline_ms: float
    ) -> None:
        """Add up the neighbours' results for the sources that this rank forwards for."""
        hits = handle.forwarded[transfer.chunk]
        self._send_buffer.begin()
        for v, source in self._routes.partners.items():
            counts = arrivals.wait(self._routes.expected_to_reduce(transfer, v), deadline_ms)
            if source in self._group.suspects:
                continue
            target = self._routes.to_owner(source)
            if arrivals.status().must_stop:
                self._send_buffer.give_up(target, transfer)
                continue
            sums_nH = self._by_token.reduce(transfer, v, counts, hits[v])
            block, values_nH = self._open_values(target, transfer)
            values_nH[: len(sums_nH)].copy_(sums_nH)
            self._send_buffer.send(target, transfer, block, len(sums_nH))

    # -- giving up -----------------------------------------------------------------------------

    def give_up_dispatch(self, transfer: TransferId) -> None:
        """Tell all who would wait for this rank's rows, or for those that it forwards."""
        for target in self._routes.all_of_tokens():
            self._send_buffer.give_up(target, transfer)

    def give_up_combine(self, transfer: TransferId) -> None:
        """Tell all who would wait for this rank's results."""
        for target in self._routes.all_of_results():
            self._send_buffer.give_up(target, transfer)

    # -- inside --------------------------------------------------------------------------------

    def _open_values(self, target: Target, transfer: TransferId) -> tuple[Tensor, Tensor]:
        """Return the records for a place, and a view of their values."""
        block = self._send_buffer.open(target, transfer)
        return block, self._config.combine_format.values(block)
