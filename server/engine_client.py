"""What the gateway needs of an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.stats import Stats
from whalepod.server.messages import EngineInfo, Experts, Submit


class EngineClient(Protocol):
    """One engine as seen from the gateway's event loop."""

    @property
    def info(self) -> EngineInfo:
        """What the engine said when it became ready."""
        ...

    @property
    def stats(self) -> Stats:
        """The newest counters that the engine sent."""
        ...

    @property
    def rank_stats(self) -> Mapping[int, Stats]:
        """The newest counters of each rank, by rank; one engine is rank 0."""
        ...

    @property
    def experts(self) -> Experts | None:
        """Where experts are and what load they had; None: they do not move, or did not yet."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine is lost, or None while it is well."""
        ...

    def submit(self, request: Submit) -> AsyncGenerator[SequenceOutput]:
        """Yield outputs of all sequences until each has a finish reason or was aborted.

        Closing the iterator early (a client that left, a stop string) aborts the request in the
        engine and frees its blocks. Raises RequestRejected when the engine refuses the request and
        EngineLost when it dies.
        """
        ...

    def abort_answer(self, request_id: str, index: int) -> None:
        """End one answer of a request between two of its outputs: its slot is free for others, and
        nothing more of it is yielded. Ignored when the answer, or the request, has ended."""
        ...

    def reset_prefix_cache(self) -> None:
        """Have the engine forget the cached texts that no live request uses, before the next ping.

        Raises EngineLost when it is lost already.
        """
        ...

    def place_experts(self, slots: tuple[tuple[int, ...], ...]) -> None:
        """Have the group place experts so before its next step; no slots: as the loads say.

        What does not fit is refused in the engine's log. Raises EngineLost when it is lost already.
        """
        ...

    async def ping(self, timeout_s: float) -> Stats:
        """Return fresh counters from the engine loop itself; EngineLost after `timeout_s`."""
        ...
