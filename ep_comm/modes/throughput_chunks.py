"""One chunk of a throughput dispatch or combine: send, pass on, receive; return, reduce, add up.

Suffix letters as in `whalepod.ep_comm.layout`, J ranks of a node.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.group import Arrivals, CallStatus, Group
from whalepod.ep_comm.lane import Turn
from whalepod.ep_comm.modes.routes import Routes
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig, ThroughputRegions
from whalepod.ep_comm.modes.throughput_rows import Routing, RowsByArrival, TokenSums
from whalepod.ep_comm.row_kernels.interface import RowKernels, TokenRows
from whalepod.ep_comm.rows import Outbox


class Chunks:
    """Moves chunks between this rank and the others; keeps nothing from one to the next."""

    def __init__(
        self,
        group: Group,
        config: ThroughputConfig,
        regions: ThroughputRegions,
        routes: Routes,
        row_kernels: RowKernels,
    ) -> None:
        self._group = group
        self._config = config
        self._regions = regions
        self._routes = routes
        self._kernels = row_kernels
        self.outbox = Outbox(group, regions.staging)
        self._there, self._back = config.dispatch_format, config.combine_format

    # -- dispatch ------------------------------------------------------------------------------

    def send(self, turn: Turn, tokens: TokenRows, routing: Routing) -> None:
        """Send to the neighbours directly, and once to each other node."""
        self.outbox.begin()
        start = turn.chunk * self._config.chunk_tokens
        is_in_TR = routing.is_token_in_rank_TR[start : start + self._config.chunk_tokens]
        routes = [r for r in self._routes.of_tokens(is_in_TR) if r.rank not in self._group.suspects]
        blocks = [
            r.lane.open(self.outbox, r.rank, turn, r.place, len(r.is_member_T)) for r in routes
        ]
        members_TD = torch.stack([r.is_member_T for r in routes], dim=1)
        counts = self._kernels.pack(self._there, tokens, members_TD, blocks, start)
        for route, block, count in zip(routes, blocks, counts, strict=True):
            route.lane.send(self.outbox, route.rank, turn, route.place, block[:count])

    def forward(self, turn: Turn, routing: Routing, deadline_ms: float) -> CallStatus:
        """Pass on what came from the ranks with this rank's place on the other nodes."""
        lane, sources = self._regions.forwarded, self._routes.partners
        arrivals = Arrivals(self._group, "throughput dispatch, forwarding", turn.epoch)
        counts = arrivals.wait(
            [lane.expect(turn, v, source, source) for v, source in sources.items()], deadline_ms
        )
        self.outbox.begin()
        forwarded = {}
        for v, source in sources.items():
            if source not in counts:
                for rank in self._routes.neighbours:
                    self._regions.rows.give_up(self._group, rank, turn, source)
                continue
            records = lane.received(self._group.transport.heap, turn, v, counts[source])
            forwarded[v] = self._pass_on(turn, source, records)
        arrivals.check_unchanged()
        routing.forwarded.append(forwarded)
        return arrivals.status()

    def _pass_on(self, turn: Turn, source: int, records: Tensor) -> Tensor:
        """Send each record to the neighbours that its choices name; returns `[n, J]` bool."""
        ids_nK = self._there.views(records).ids_K.long()
        owners_nK = layout.owner_of(ids_nK, self._config.num_experts, self._config.num_ranks)
        ranks_J = torch.tensor(self._routes.neighbours)
        hits_nJ = (owners_nK[:, None, :] == ranks_J[None, :, None]).any(dim=2)
        for j, rank in enumerate(self._routes.neighbours):
            if rank in self._group.suspects:
                continue
            chosen = hits_nJ[:, j].nonzero().squeeze(1)
            block = self._regions.rows.open(self.outbox, rank, turn, source, len(chosen))
            torch.index_select(records, 0, chosen, out=block)
            self._regions.rows.send(self.outbox, rank, turn, source, block)
        return hits_nJ

    def receive(
        self,
        turn: Turn,
        rows: RowsByArrival,
        first_R: list[int],
        routing: Routing,
        deadline_ms: float,
    ) -> CallStatus:
        """Copy a chunk's rows behind those that each source sent before."""
        lane, sources = self._regions.rows, range(self._config.num_ranks)
        arrivals = Arrivals(self._group, "throughput dispatch", turn.epoch)
        expected = [lane.expect(turn, s, s, self._routes.writer_for(s)) for s in sources]
        counts = arrivals.wait(expected, deadline_ms)
        for source, count in counts.items():
            records = lane.received(self._group.transport.heap, turn, source, count)
            rows.store(first_R[source], source, records)
            first_R[source] += count
        arrivals.check_unchanged()
        routing.received.append(counts)
        return arrivals.status()

    # -- combine -------------------------------------------------------------------------------

    def give_back(
        self,
        turn: Turn,
        y_NH: Tensor,
        weights_NK: Tensor | None,
        first_R: list[int],
        routing: Routing,
    ) -> None:
        """Send a chunk's rows to their sources, or to the rank that adds up for them."""
        self.outbox.begin()
        received = routing.received[turn.chunk]
        for source in range(self._config.num_ranks):
            count, first = received.get(source, 0), first_R[source]
            first_R[source] += count
            rank, lane, place = self._routes.of_sums(source)
            if rank in self._group.suspects:
                continue
            records = lane.open(self.outbox, rank, turn, place, count)
            weights = None if weights_NK is None else weights_NK[first : first + count]
            self._write_sums(records, y_NH[first : first + count], weights)
            lane.send(self.outbox, rank, turn, place, records)

    def reduce(self, turn: Turn, routing: Routing, deadline_ms: float) -> CallStatus:
        """Add up the neighbours' rows for the sources that this rank forwards for."""
        lane, hits = self._regions.reduced, routing.forwarded[turn.chunk]
        arrivals = Arrivals(self._group, "throughput combine, reduction", turn.epoch)
        self.outbox.begin()
        for v, source in self._routes.partners.items():
            places = {
                rank: self._routes.place_to_reduce(v, j)
                for j, rank in enumerate(self._routes.neighbours)
            }
            counts = arrivals.wait(
                [lane.expect(turn, place, rank, rank) for rank, place in places.items()],
                deadline_ms,
            )
            if source in self._group.suspects:
                continue
            if arrivals.status().must_stop:
                self._regions.returned.give_up(self._group, source, turn, self._group.rank)
                continue
            part = TokenSums.zeros(len(hits[v]), self._config)
            for j, (rank, place) in enumerate(places.items()):
                if rank not in counts:
                    continue
                records = lane.received(self._group.transport.heap, turn, place, counts[rank])
                part.add(hits[v][:, j], self._back.views(records), self._kernels)
            block = self._regions.returned.open(
                self.outbox, source, turn, self._group.rank, len(hits[v])
            )
            self._write_sums(block, part.y_TH, part.weights_TK)
            self._regions.returned.send(self.outbox, source, turn, self._group.rank, block)
        arrivals.check_unchanged()
        return arrivals.status()

    def add(self, turn: Turn, sums: TokenSums, routing: Routing, deadline_ms: float) -> CallStatus:
        """Add a chunk's rows to its tokens: straight away, or with several nodes node by node."""
        lane, topology = self._regions.returned, self._config.topology
        start = turn.chunk * self._config.chunk_tokens
        is_in_TR = routing.is_token_in_rank_TR[start : start + self._config.chunk_tokens]
        is_on_TV = layout.nodes_hit(is_in_TR, topology.num_nodes)
        writers = {v: [partner] for v, partner in self._routes.partners.items()}
        writers[self._routes.node] = list(self._routes.neighbours)
        arrivals = Arrivals(self._group, "throughput combine", turn.epoch)
        expected = [lane.expect(turn, r, r, r) for v in sorted(writers) for r in writers[v]]
        counts = arrivals.wait(expected, deadline_ms)
        heap, of_chunk = self._group.transport.heap, sums.of_tokens(start, len(is_in_TR))
        for v in sorted(writers):
            part = of_chunk
            if topology.num_nodes > 1:
                part = TokenSums.zeros(len(is_in_TR), self._config)
            for rank in writers[v]:
                if rank not in counts:
                    continue
                is_member_T = is_in_TR[:, rank] if v == self._routes.node else is_on_TV[:, v]
                records = lane.received(heap, turn, rank, counts[rank])
                part.add(is_member_T, self._back.views(records), self._kernels)
            if topology.num_nodes > 1:
                of_chunk.add_rounded(part, self._back.torch_dtype)
        arrivals.check_unchanged()
        return arrivals.status()

    # -- inside --------------------------------------------------------------------------------

    def _write_sums(self, records: Tensor, y_nH: Tensor, weights_nK: Tensor | None) -> None:
        views = self._back.views(records)
        views.values_H.copy_(y_nH)
        if weights_nK is None:
            views.weights_K.zero_()
        else:
            views.weights_K.copy_(weights_nK)
