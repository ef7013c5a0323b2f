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
from whalepod.ep_comm.group import CallStatus, Group, merge
from whalepod.ep_comm.lane import Turn
from whalepod.ep_comm.modes.routes import Routes
from whalepod.ep_comm.modes.throughput_chunks import Chunks
from whalepod.ep_comm.modes.throughput_config import ThroughputConfig, ThroughputRegions
from whalepod.ep_comm.modes.throughput_rows import Received, Routing, RowsByArrival, TokenSums
from whalepod.ep_comm.row_kernels.compiled import CompiledRows
from whalepod.ep_comm.row_kernels.interface import RowKernels, TokenRows

_FORWARD_GRACE = 0.25
"""With several nodes, the last wait of a chunk is this part of the timeout longer, so that it is
the forwarder which reports a dead source, and not the forwarder that is taken for dead."""


class Throughput:
    """One rank's end of the mode.

    row_kernels  how rows are copied and summed; default: compiled for the CPU
    """

    def __init__(
        self,
        group: Group,
        config: ThroughputConfig,
        regions: ThroughputRegions,
        *,
        row_kernels: RowKernels | None = None,
    ) -> None:
        assert group.topology == config.topology, (group.topology, config.topology)
        self.group = group
        self.config = config
        self._counts = Exchange(group, regions.counts, "throughput counts")
        self._num_dispatches = 0
        self._num_combines = 0
        self._open_dispatch: Turn | None = None
        self._open_combine: Turn | None = None
        self._kernels = row_kernels or CompiledRows()
        self._routes = Routes(group, config, regions)
        self._chunks = Chunks(group, config, regions, self._routes, self._kernels)
        self.outbox = self._chunks.outbox

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
        config, tokens = self.config, self._tokens(x, ids_TK, weights_TK)
        is_in_TR = self._kernels.destinations(ids_TK, config.num_experts, config.num_ranks)
        deadline_ms = self.group.deadline(timeout_ms)
        record = torch.cat([torch.tensor([len(ids_TK)]), is_in_TR.sum(dim=0)])
        records, status = self._counts.gather(record, deadline_ms)
        count_RR = torch.zeros(config.num_ranks, config.num_ranks, dtype=torch.int64)
        for rank, found in records.items():
            count_RR[rank] = found[1:]
        most_tokens = max((int(found[0]) for found in records.values()), default=0)
        self._check_static(count_RR, num_static_rows)
        routing = Routing(
            ids_TK=ids_TK,
            weights_TK=weights_TK,
            is_token_in_rank_TR=is_in_TR,
            count_RR=count_RR,
            num_chunks=_odd(-(-most_tokens // config.chunk_tokens)),
        )
        return self._run_dispatch(tokens, routing, timeout_ms, num_static_rows, status)

    def dispatch_again(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        routing: Routing,
        timeout_ms: float,
        *,
        num_static_rows: int | None = None,
    ) -> Received:
        """Send other rows the same way, without counting again. All ranks call it alike."""
        tokens = self._tokens(x, routing.ids_TK, routing.weights_TK)
        self._check_static(routing.count_RR, num_static_rows)
        fresh = Routing(
            ids_TK=routing.ids_TK,
            weights_TK=routing.weights_TK,
            is_token_in_rank_TR=routing.is_token_in_rank_TR,
            count_RR=routing.count_RR,
            num_chunks=routing.num_chunks,
        )
        return self._run_dispatch(tokens, fresh, timeout_ms, num_static_rows, None)

    def _run_dispatch(
        self,
        tokens: TokenRows,
        routing: Routing,
        timeout_ms: float,
        num_static_rows: int | None,
        status: CallStatus | None,
    ) -> Received:
        self._num_dispatches += 1
        turn = self._open_dispatch = Turn(self._num_dispatches, 0)
        count_R = routing.count_RR[:, self.group.rank]
        first_R = (count_R.cumsum(0) - count_R).tolist()
        num_rows = int(count_R.sum())
        rows = RowsByArrival(
            self.config, self.group.rank, num_static_rows or num_rows, self._kernels
        )
        while turn.chunk < routing.num_chunks and not (status and status.must_stop):
            deadline_ms = self.group.deadline(timeout_ms)
            self._chunks.send(turn, tokens, routing)
            status = self._chunks.forward(turn, routing, deadline_ms)
            last_ms = deadline_ms + self._grace(timeout_ms)
            arrived = self._chunks.receive(turn, rows, first_R, routing, last_ms)
            status = merge(status, arrived)
            turn = self._open_dispatch = turn.next()
        assert status is not None
        self._open_dispatch = None
        if status.must_stop:
            self._routes.give_up_dispatch(turn)
        return rows.finish(num_rows, routing, status)

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
        turn = self._open_combine = Turn(self._num_combines, 0)
        sums = TokenSums.zeros(len(routing.ids_TK), self.config)
        first_R = self._first_rows(routing)
        status: CallStatus | None = None
        while turn.chunk < routing.num_chunks and not (status and status.must_stop):
            deadline_ms = self.group.deadline(timeout_ms)
            self._chunks.give_back(turn, y_NH, weights_NK, first_R, routing)
            status = self._chunks.reduce(turn, routing, deadline_ms)
            last_ms = deadline_ms + self._grace(timeout_ms)
            status = merge(status, self._chunks.add(turn, sums, routing, last_ms))
            turn = self._open_combine = turn.next()
        assert status is not None
        self._open_combine = None
        if status.must_stop:
            self._routes.give_up_combine(turn)
        for term_TH in bias:
            sums.y_TH.add_(term_TH.float())
        y_TH = sums.y_TH.to(self.config.combine_format.torch_dtype)
        return y_TH, None if weights_NK is None else sums.weights_TK, status

    # -- giving up -----------------------------------------------------------------------------

    def abort(self) -> None:
        """Take part in the next dispatch and combine only by giving them up, and so with a call
        in which this rank has raised: the others wait for its chunk, or the one after.

        Lets the others know at once when this rank's step has raised.
        """
        self._counts.abort()
        for turn in _turns_ahead(self._open_dispatch, self._num_dispatches):
            self._routes.give_up_dispatch(turn)
        for turn in _turns_ahead(self._open_combine, self._num_combines):
            self._routes.give_up_combine(turn)
        self._open_dispatch = self._open_combine = None

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
        self._open_dispatch = self._open_combine = None
        self.group.culprit = None

    # -- inside --------------------------------------------------------------------------------

    def _tokens(
        self, x: Tensor | tuple[Tensor, Tensor], ids_TK: Tensor, weights_TK: Tensor
    ) -> TokenRows:
        """Check shapes and return what goes into records."""
        config = self.config
        values, scales = x if isinstance(x, tuple) else (x, None)
        layout.check_choice_shape(ids_TK, config.num_choices)
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
        return TokenRows(values_TH=values, scales_TG=scales, ids_TK=ids_TK, weights_TK=weights_TK)

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


def _turns_ahead(begun: Turn | None, num_calls: int) -> list[Turn]:
    """Return what others may wait for: two chunks of a call that has begun, else the next call."""
    return [Turn(num_calls + 1, 0)] if begun is None else [begun, begun.next()]


def _odd(num_chunks: int) -> int:
    """Return the next odd number, so that sets alternate from call to call."""
    return num_chunks | 1
