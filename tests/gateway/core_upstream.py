"""A real engine on the event loop of its gateway: for tests of what only a sampler can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.stats import Stats
from whalepod.server.engine.core import EngineCore
from whalepod.server.messages import Abort, EngineInfo, Experts, Rejected, ResetPrefixCache, Submit


class CoreUpstream:
    """An `EngineClient` that steps the engine whenever somebody waits for an output."""

    failure: str | None = None

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self._outputs: dict[str, list[SequenceOutput]] = {}
        self._live: dict[str, set[int]] = {}
        self.submitted: dict[str, Submit] = {}
        self.history: list[tuple[int, SequenceOutput]] = []
        """All outputs in their order, with the number of the step that gave them."""
        self._num_steps = 0

    @property
    def info(self) -> EngineInfo:
        return self.core.info

    @property
    def stats(self) -> Stats:
        return self.core.stats

    @property
    def rank_stats(self) -> dict[int, Stats]:
        return {0: self.stats}

    experts: Experts | None = None

    def place_experts(self, slots: tuple[tuple[int, ...], ...]) -> None:
        self.placed = slots

    def reset_prefix_cache(self) -> None:
        self.core.receive([ResetPrefixCache()])

    async def ping(self, timeout_s: float) -> Stats:
        return self.stats

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceOutput]:
        self.submitted[request.request_id] = request
        for reply in self.core.receive([request]):
            assert isinstance(reply, Rejected)
            raise RequestRejected(reply.code, reply.message, reply.param)
        mine = self._outputs[request.request_id] = []
        live = self._live[request.request_id] = set(range(request.num_sequences))
        try:
            while live:
                self._step()
                while mine:
                    output = mine.pop(0)
                    if output.index not in live:
                        continue
                    if output.finish_reason is not None:
                        live.remove(output.index)
                    yield output
                await asyncio.sleep(0)
        finally:
            del self._outputs[request.request_id], self._live[request.request_id]
            self.core.receive([Abort(request_id=request.request_id)])

    def abort_answer(self, request_id: str, index: int) -> None:
        self._live[request_id].discard(index)
        self.core.receive([Abort(request_id=request_id, index=index)])

    def _step(self) -> None:
        step = self.core.step()
        self._num_steps += 1
        for output in step.outputs if step is not None else ():
            self._outputs[output.request_id].append(output)
            self.history.append((self._num_steps, output))
