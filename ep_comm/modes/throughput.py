"""Dispatch and combine for prefill: a row per (token, rank), counts on the host.

The contract is that of DeepEP's normal mode. Tokens go in chunks through fixed blocks, two sets in
turn, where DeepEP has ring queues. A rank sends chunk c + 2 only when it has chunk c + 1 of all
ranks, which each of them sent after it had read chunk c: that is all the flow control there is.

With several nodes a token crosses to each node once, to the rank with this rank's place there,
which passes it on to the ranks that the token's choices name. Sums come back the same way, added up
on the node first. Suffix letters as in `whalepod.ep_comm.layout`, J ranks of a node.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.exchange import Exchange
from whalepod.ep_comm.group import Arrivals, CallStatus, Group, merge
from whalepod.ep_comm.lane import Turn
from whalepod.ep_comm.modes.routes import Routes
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig, ThroughputRegions
from whalepod.ep_comm.modes.throughput_rows import Received, Routing, RowsByArrival, TokenSums
from whalepod.ep_comm.rows import Outbox, gather_rows

_FORWARD_GRACE = 0.25
"""With several nodes, the last wait of a chunk is this part of the timeout longer, so that it is
the forwarder which reports a dead source, and not the forwarder that is taken for dead."""


class Throughput:
    """One rank's end of the mode."""

    def __init__(self, group: Group, config: ThroughputConfig, regions: ThroughputRegions) -> None:
        assert group.topology == config.topology, (group.topology, config.topology)
        self.group = group
        self.config = config
        self._regions = regions
        self._counts = Exchange(group, regions.counts, "throughput counts")
        self.outbox = Outbox(group, regions.staging)
        self._num_dispatches = 0
        self._num_combines = 0
        self._there, self._back = config.dispatch_format, config.combine_format
        self._routes = Routes(group, config, regions)

    # -- dispatch ------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        ids_TK: Tensor,
        weights_TK: Tensor,
        timeout_ms: float,
        *,
        num_static_rows: int | None = None,
    ) -> Received:
        """Send each token to every rank that owns one of its experts.

        x                [T, H], or e4m3 [T, H] and f32 scales [T, H / 128] that go with it
        ids_TK           [T, K] int64 global expert ids, -1: none
        weights_TK       [T, K] f32, delivered to the experts' ranks
        timeout_ms       for the counts, and then for each chunk
        num_static_rows  allocate so many rows whatever comes (for graphs)

        Raises ValueError for bad input; if more than `num_static_rows` rows come to any rank, on
        all ranks.
        """
        values, scales = x if isinstance(x, tuple) else (x, None)
        self._check_input(values, scales, ids_TK, weights_TK)
        deadline_ms = self.group.deadline(timeout_ms)
        counted = layout.dispatch_layout(ids_TK, self.config.num_experts, self.config.num_ranks)
        record = torch.cat([torch.tensor([len(ids_TK)]), counted.num_tokens_per_rank_R])
        records, status = self._counts.gather(record, deadline_ms)
        count_RR = torch.zeros(self.config.num_ranks, self.config.num_ranks, dtype=torch.int64)
        for rank, found in records.items():
            count_RR[rank] = found[1:]
        most_tokens = max((int(found[0]) for found in records.values()), default=0)
        self._check_static(count_RR, num_static_rows)
        routing = Routing(
            ids_TK=ids_TK,
            weights_TK=weights_TK,
            is_token_in_rank_TR=counted.is_token_in_rank_TR,
            count_RR=count_RR,
            num_chunks=_odd(-(-most_tokens // self.config.chunk_tokens)),
        )
        return self._run_dispatch(values, scales, routing, timeout_ms, num_static_rows, status)

    def dispatch_again(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        routing: Routing,
        timeout_ms: float,
        *,
        num_static_rows: int | None = None,
    ) -> Received:
        """Send other rows the same way, without counting again. All ranks call it alike."""
        values, scales = x if isinstance(x, tuple) else (x, None)
        self._check_input(values, scales, routing.ids_TK, routing.weights_TK)
        self._check_static(routing.count_RR, num_static_rows)
        fresh = Routing(
            ids_TK=routing.ids_TK,
            weights_TK=routing.weights_TK,
            is_token_in_rank_TR=routing.is_token_in_rank_TR,
            count_RR=routing.count_RR,
            num_chunks=routing.num_chunks,
        )
        return self._run_dispatch(values, scales, fresh, timeout_ms, num_static_rows, None)

    def _run_dispatch(
        self,
        values_TH: Tensor,
        scales_TG: Tensor | None,
        routing: Routing,
        timeout_ms: float,
        num_static_rows: int | None,
        status: CallStatus | None,
    ) -> Received:
        self._num_dispatches += 1
        count_R = routing.count_RR[:, self.group.rank]
        first_R = (count_R.cumsum(0) - count_R).tolist()
        num_rows = int(count_R.sum())
        rows = RowsByArrival(self.config, num_static_rows or num_rows)
        turn = Turn(self._num_dispatches, 0)
        while turn.chunk < routing.num_chunks and not (status and status.must_stop):
            deadline_ms = self.group.deadline(timeout_ms)
            self._send_chunk(turn, values_TH, scales_TG, routing)
            status = self._forward_chunk(turn, routing, deadline_ms)
            last_ms = deadline_ms + self._grace(timeout_ms)
            arrived = self._receive_chunk(turn, rows, first_R, routing, last_ms)
            status = merge(status, arrived)
            turn = turn.next()
        assert status is not None
        if status.must_stop:
            self._routes.give_up_dispatch(turn)
        return rows.finish(self.config, self.group.rank, num_rows, routing, status)

    def _send_chunk(
        self, turn: Turn, values_TH: Tensor, scales_TG: Tensor | None, routing: Routing
    ) -> None:
        """Send to the neighbours directly, and once to each other node."""
        self.outbox.begin()
        start = turn.chunk * self.config.chunk_tokens
        is_in_TR = routing.is_token_in_rank_TR[start : start + self.config.chunk_tokens]
        for rank, lane, place, is_member_T in self._routes.of_tokens(is_in_TR):
            if rank in self.group.suspects:
                continue
            tokens = is_member_T.nonzero().squeeze(1) + start
            records = lane.open(self.outbox, rank, turn, place, len(tokens))
            views = self._there.views(records)
            views.token.copy_(tokens)
            views.ids_K.copy_(routing.ids_TK[tokens])
            views.weights_K.copy_(routing.weights_TK[tokens])
            gather_rows(values_TH, tokens, views.values_H)
            if scales_TG is not None:
                views.scales_G.copy_(scales_TG[tokens])
            lane.send(self.outbox, rank, turn, place, records)

    def _forward_chunk(self, turn: Turn, routing: Routing, deadline_ms: float) -> CallStatus:
        """Pass on what came from the ranks with this rank's place on the other nodes."""
        lane, sources = self._regions.forwarded, self._routes.partners
        arrivals = Arrivals(self.group, "throughput dispatch, forwarding", turn.epoch)
        counts = arrivals.wait(
            [lane.expect(turn, v, source, source) for v, source in sources.items()], deadline_ms
        )
        self.outbox.begin()
        forwarded = {}
        for v, source in sources.items():
            if source not in counts:
                for rank in self._routes.neighbours:
                    self._regions.rows.give_up(self.group, rank, turn, source)
                continue
            records = lane.received(self.group.transport.heap, turn, v, counts[source])
            forwarded[v] = self._pass_on(turn, source, records)
        arrivals.check_unchanged()
        routing.forwarded.append(forwarded)
        return arrivals.status()

    def _pass_on(self, turn: Turn, source: int, records: Tensor) -> Tensor:
        """Send each record to the neighbours that its choices name; returns `[n, J]` bool."""
        ids_nK = self._there.views(records).ids_K.long()
        owners_nK = layout.owner_of(ids_nK, self.config.num_experts, self.config.num_ranks)
        ranks_J = torch.tensor(self._routes.neighbours)
        hits_nJ = (owners_nK[:, None, :] == ranks_J[None, :, None]).any(dim=2)
        for j, rank in enumerate(self._routes.neighbours):
            if rank in self.group.suspects:
                continue
            chosen = hits_nJ[:, j].nonzero().squeeze(1)
            block = self._regions.rows.open(self.outbox, rank, turn, source, len(chosen))
            torch.index_select(records, 0, chosen, out=block)
            self._regions.rows.send(self.outbox, rank, turn, source, block)
        return hits_nJ

    def _receive_chunk(
        self,
        turn: Turn,
        rows: RowsByArrival,
        first_R: list[int],
        routing: Routing,
        deadline_ms: float,
    ) -> CallStatus:
        """Copy a chunk's rows behind those that each source sent before."""
        lane, sources = self._regions.rows, range(self.config.num_ranks)
        arrivals = Arrivals(self.group, "throughput dispatch", turn.epoch)
        expected = [lane.expect(turn, s, s, self._routes.writer_for(s)) for s in sources]
        counts = arrivals.wait(expected, deadline_ms)
        for source, count in counts.items():
            records = lane.received(self.group.transport.heap, turn, source, count)
            rows.store(first_R[source], source, self._there.views(records))
            first_R[source] += count
        arrivals.check_unchanged()
        routing.received.append(counts)
        return arrivals.status()

    # -- combine -------------------------------------------------------------------------------

    def combine(
        self,
        y_NH: Tensor,
        routing: Routing,
        timeout_ms: float,
        *,
        weights_NK: Tensor | None = None,
        bias: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor | None, CallStatus]:
        """Add up, for each token of this rank, the rows of the ranks that received it.

        y_NH        [N, H] rows in the order of `Received`; no weight is applied here
        weights_NK  [N, K] f32 to add up beside them: those received give the original ones back
        bias        up to two [T, H] that are added last
        returns     y [T, H] of the combine dtype, weights [T, K] or None, and the status

        The sum is in f32: over ranks in order, inside each node first (a node's sum is rounded to
        the combine dtype if there are several nodes), then the biases; it is rounded once more.
        """
        if len(routing.received) < routing.num_chunks:
            raise ValueError("the dispatch of this routing did not end well: abort the step")
        self._num_combines += 1
        sums = TokenSums(len(routing.ids_TK), self.config)
        first_R = self._first_rows(routing)
        turn, status = Turn(self._num_combines, 0), None
        while turn.chunk < routing.num_chunks and not (status and status.must_stop):
            deadline_ms = self.group.deadline(timeout_ms)
            self._return_chunk(turn, y_NH, weights_NK, first_R, routing)
            status = self._reduce_chunk(turn, routing, deadline_ms)
            last_ms = deadline_ms + self._grace(timeout_ms)
            status = merge(status, self._add_chunk(turn, sums, routing, last_ms))
            turn = turn.next()
        assert status is not None
        if status.must_stop:
            self._routes.give_up_combine(turn)
        for term_TH in bias:
            sums.y_TH += term_TH.float()
        y_TH = sums.y_TH.to(self._back.torch_dtype)
        return y_TH, None if weights_NK is None else sums.weights_TK, status

    def _return_chunk(
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
        for source in range(self.config.num_ranks):
            count, first = received.get(source, 0), first_R[source]
            first_R[source] += count
            rank, lane, place = self._routes.of_sums(source)
            if rank in self.group.suspects:
                continue
            records = lane.open(self.outbox, rank, turn, place, count)
            weights = None if weights_NK is None else weights_NK[first : first + count]
            self._write_sums(records, y_NH[first : first + count], weights)
            lane.send(self.outbox, rank, turn, place, records)

    def _reduce_chunk(self, turn: Turn, routing: Routing, deadline_ms: float) -> CallStatus:
        """Add up the neighbours' rows for the sources that this rank forwards for."""
        lane, hits = self._regions.reduced, routing.forwarded[turn.chunk]
        arrivals = Arrivals(self.group, "throughput combine, reduction", turn.epoch)
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
            if source in self.group.suspects:
                continue
            if arrivals.status().must_stop:
                self._regions.returned.give_up(self.group, source, turn, self.group.rank)
                continue
            part = TokenSums(len(hits[v]), self.config)
            for j, (rank, place) in enumerate(places.items()):
                if rank not in counts:
                    continue
                records = lane.received(self.group.transport.heap, turn, place, counts[rank])
                part.add(hits[v][:, j].nonzero().squeeze(1), self._back.views(records))
            block = self._regions.returned.open(
                self.outbox, source, turn, self.group.rank, len(hits[v])
            )
            self._write_sums(block, part.y_TH, part.weights_TK)
            self._regions.returned.send(self.outbox, source, turn, self.group.rank, block)
        arrivals.check_unchanged()
        return arrivals.status()

    def _add_chunk(
        self, turn: Turn, sums: TokenSums, routing: Routing, deadline_ms: float
    ) -> CallStatus:
        """Add a chunk's rows to its tokens, node by node."""
        lane, topology = self._regions.returned, self.config.topology
        start = turn.chunk * self.config.chunk_tokens
        is_in_TR = routing.is_token_in_rank_TR[start : start + self.config.chunk_tokens]
        is_on_TV = layout.nodes_hit(is_in_TR, topology.num_nodes)
        writers = {v: [partner] for v, partner in self._routes.partners.items()}
        writers[self._routes.node] = list(self._routes.neighbours)
        arrivals = Arrivals(self.group, "throughput combine", turn.epoch)
        expected = [lane.expect(turn, r, r, r) for v in sorted(writers) for r in writers[v]]
        counts = arrivals.wait(expected, deadline_ms)
        heap = self.group.transport.heap
        for v in sorted(writers):
            part = TokenSums(len(is_in_TR), self.config)
            for rank in writers[v]:
                if rank not in counts:
                    continue
                is_member_T = is_in_TR[:, rank] if v == self._routes.node else is_on_TV[:, v]
                records = lane.received(heap, turn, rank, counts[rank])
                part.add(is_member_T.nonzero().squeeze(1), self._back.views(records))
            sums.add_part(start, part, is_rounded=topology.num_nodes > 1)
        arrivals.check_unchanged()
        return arrivals.status()

    # -- giving up -----------------------------------------------------------------------------

    def abort(self) -> None:
        """Take part in the next dispatch and combine only by giving them up.

        Lets the others know at once when this rank's step has raised.
        """
        self._counts.abort()
        self._routes.give_up_dispatch(Turn(self._num_dispatches + 1, 0))
        self._routes.give_up_combine(Turn(self._num_combines + 1, 0))

    def resume(self, call: int) -> None:
        """Number the next dispatch and combine `call`, on all ranks, after they synchronised.

        `call` must be above all numbers used so far; brings ranks that failed at different places
        of a step together again.
        """
        used = max(self._num_dispatches, self._num_combines, self._counts.number) + 1
        if call <= used:
            raise ValueError(f"call {call} must be above {used}, which may be in use")
        self._num_dispatches = self._num_combines = call - 1
        self._counts.resume(call)
        self.group.culprit = None

    # -- inside --------------------------------------------------------------------------------

    def _check_input(
        self, values: Tensor, scales: Tensor | None, ids_TK: Tensor, weights_TK: Tensor
    ) -> None:
        config = self.config
        layout.check_choices(ids_TK, config.num_experts, config.num_choices)
        num_tokens = len(ids_TK)
        if values.shape != (num_tokens, config.hidden) or weights_TK.shape != ids_TK.shape:
            raise ValueError(
                f"rows must be [{num_tokens}, {config.hidden}] and weights {list(ids_TK.shape)}, "
                f"got {list(values.shape)} and {list(weights_TK.shape)}"
            )
        if num_tokens > config.max_tokens:
            raise ValueError(
                f"{num_tokens} tokens in one throughput dispatch, at most {config.max_tokens}: "
                f"raise max_tokens on all ranks or dispatch fewer tokens in a step"
            )
        if (scales is not None) != (config.dispatch_dtype == "float8"):
            raise ValueError(
                f"dispatch_dtype is {config.dispatch_dtype}, but scales are "
                f"{'absent' if scales is None else 'given'}: quantize_rows makes both"
            )

    def _check_static(self, count_RR: Tensor, num_static_rows: int | None) -> None:
        received_R = count_RR.sum(dim=0)
        if num_static_rows is not None and int(received_R.max()) > num_static_rows:
            rank = int(received_R.argmax())
            raise ValueError(
                f"{int(received_R[rank])} rows come to rank {rank}, but num_static_rows is "
                f"{num_static_rows}: raise it on all ranks"
            )

    def _grace(self, timeout_ms: float) -> float:
        return _FORWARD_GRACE * timeout_ms if self._routes.partners else 0.0

    def _first_rows(self, routing: Routing) -> list[int]:
        count_R = routing.count_RR[:, self.group.rank]
        first: list[int] = (count_R.cumsum(0) - count_R).tolist()
        return first

    def _write_sums(self, records: Tensor, y_nH: Tensor, weights_nK: Tensor | None) -> None:
        views = self._back.views(records)
        views.values_H.copy_(y_nH)
        if weights_nK is None:
            views.weights_K.zero_()
        else:
            views.weights_K.copy_(weights_nK)


def _odd(num_chunks: int) -> int:
    """Return the next odd number, so that sets alternate from call to call."""
    return num_chunks | 1
