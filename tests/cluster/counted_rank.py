"""A rank's process that compares each dispatch's bytes with what the layout predicts.

It adds one line per dispatch to `wire.RANK` in the group's folder: mode, tokens, predicted bytes to
each rank, bytes that were sent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from whalepod.ep_comm import layout
from whalepod.ep_comm.config import ExchangeConfig
from whalepod.ep_comm.dispatched import Dispatched, Handle
from whalepod.ep_comm.expert_exchange import DispatchInFlight, ExpertExchange
from whalepod.server.channel import EngineServer
from whalepod.server.cluster.rank_assignment import RankAssignment
from whalepod.server.cluster.rank_process import open_rank
from whalepod.server.codec import decode_value
from whalepod.server.engine_process import ServedEngine, main_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One dispatch of a rank."""

    mode: str
    num_tokens: int
    predicted: list[int]
    sent: list[int]


def read_sent(folder: Path, rank: int) -> list[Sent]:
    """Return all dispatches that a rank has written down."""
    found = []
    for line in (folder / f"wire.{rank}").read_text().splitlines():
        mode, num_tokens, predicted, sent = line.split()
        both = [[int(n) for n in text.split(",")] for text in (predicted, sent)]
        found.append(Sent(mode=mode, num_tokens=int(num_tokens), predicted=both[0], sent=both[1]))
    return found


class _Ledger:
    """Writes down what one rank sent."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, config: ExchangeConfig, ids_TK: Tensor, sent_R: Tensor) -> None:
        counts_R = layout.dispatch_layout(
            ids_TK, config.num_experts, config.num_ranks
        ).num_tokens_per_rank_R
        predicted_R = counts_R * config.dispatch_format.num_bytes
        texts = (",".join(str(n) for n in row.tolist()) for row in (predicted_R, sent_R))
        with self._path.open("a") as file:
            print(config.layout, len(ids_TK), *texts, file=file)

    def count_dispatches(self) -> None:
        """Let all dispatches of this process be written down."""
        send, receive = ExpertExchange.send_dispatch, ExpertExchange.receive_dispatch
        before: dict[int, Tensor] = {}

        def sending(
            exchange: ExpertExchange, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor
        ) -> DispatchInFlight:
            before[id(exchange)] = exchange.send_buffer.sent_bytes_R.clone()
            return send(exchange, x_TH, ids_TK, weights_TK)

        def receiving(exchange: ExpertExchange, handle: Handle, timeout_ms: float) -> Dispatched:
            result = receive(exchange, handle, timeout_ms)
            sent_R = exchange.send_buffer.sent_bytes_R - before[id(exchange)]
            self.note(exchange.config, handle.ids_TK, sent_R)
            return result

        ExpertExchange.send_dispatch = sending  # type: ignore[method-assign]
        ExpertExchange.receive_dispatch = receiving  # type: ignore[method-assign]


def open_counted(
    data: bytes, server: EngineServer, should_stop: Callable[[], bool]
) -> ServedEngine:
    """Write down what is sent once the rank is there: not its warm-up, which is a group of one."""
    assignment = decode_value(RankAssignment, data)
    ledger = _Ledger(Path(assignment.folder) / f"wire.{assignment.rank}")
    engine = open_rank(data, server, should_stop)
    ledger.count_dispatches()
    return engine


if __name__ == "__main__":
    sys.exit(main_of(sys.argv[1:], open_counted, "rank"))
