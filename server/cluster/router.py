"""Requests to ranks: who gets which, what happens when a rank is lost, and who takes over.

An `EngineClient` over the channels of all ranks, for the gateway's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.stats import Stats, add_stats
from whalepod.server.channel import EngineChannel
from whalepod.server.errors import EngineLost, GroupLost, RequestRecalled
from whalepod.server.messages import EngineInfo, Experts, Submit
from whalepod.server.retry_start import retry_start

if TYPE_CHECKING:
    from whalepod.server.cluster.rank_group import RankGroup

WATCH_S = 0.1
"""How often the router looks for lost ranks and for work to move."""
EXPECTED_TOKENS = 256
"""Tokens of an answer that a request is expected to take, if it allows as many."""
MAX_TRIES = 3
"""Ranks that may be lost under a request before its first token."""
MAX_MOVES = 4
"""How often a request may leave a queue for another rank; then it stays."""
MAX_MOVES_AT_ONCE = 4

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    """One rank as the router sees it."""

    channel: EngineChannel
    num_tokens: int = 0
    """What its live requests take, prompts and expected answers."""
    queued: dict[str, Submit] = field(default_factory=dict)
    """Requests that have not answered yet and may move, oldest first."""
    lost: str | None = None
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def capacity_tokens(self) -> int:
        info = self.channel.info
        return info.num_blocks * info.block_tokens


class RankRouter:
    """Use as `async with`, in the event loop that serves."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._ranks: list[_Rank] = []
        self._num_routed = 0
        self._failure: str | None = None
        self._replacing: dict[int, asyncio.Task[None]] = {}

    async def __aenter__(self) -> Self:
        self._info = self._group.info  # while a rank is being replaced it can say nothing
        for rank in range(self._group.num_ranks):
            self._ranks.append(await self._open(rank))
        # a thread for each rank: each replacement waits until all ranks are members
        self._threads = ThreadPoolExecutor(len(self._ranks), "replace-rank")
        self._watching = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._group.stop_replacing()
        tasks = [self._watching, *self._replacing.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)
        for rank in self._ranks:
            await rank.stack.aclose()

    async def _open(self, rank: int) -> _Rank:
        opened = _Rank(self._group.rank_channel(rank))
        await opened.stack.enter_async_context(opened.channel)
        return opened

    # -- what the gateway asks ------------------------------------------------------------------

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def stats(self) -> Stats:
        """Counters and gauges of all ranks together."""
        return add_stats([rank.channel.stats for rank in self._ranks])

    @property
    def rank_stats(self) -> Mapping[int, Stats]:
        """Counters and gauges of each rank."""
        return {number: rank.channel.stats for number, rank in enumerate(self._ranks)}

    @property
    def experts(self) -> Experts | None:
        """Where experts are, as the lowest live rank said last."""
        alive = [rank.channel.experts for rank in self._ranks if rank.lost is None]
        return next((found for found in alive if found is not None), None)

    @property
    def failure(self) -> str | None:
        """Why no request can be served any more; a rank that is being replaced is no failure."""
        return self._failure or self._group.failure

    def reset_prefix_cache(self) -> None:
        """Have all ranks forget the cached texts that no live request uses."""
        for rank in self._ranks:
            rank.channel.reset_prefix_cache()

    def place_experts(self, slots: tuple[tuple[int, ...], ...]) -> None:
        """Tell the lowest live rank; it tells the others."""
        alive = [n for n in range(len(self._ranks)) if not self._lost_reason(n)]
        if not alive:
            raise EngineLost("no rank is alive: " + "; ".join(self._describe_lost()))
        self._ranks[alive[0]].channel.place_experts(slots)

    async def ping(self, timeout_s: float) -> Stats:
        """Return fresh counters from all loops; EngineLost names each rank that did not answer."""
        found = await asyncio.gather(
            *(self._ping_rank(number, timeout_s) for number in range(len(self._ranks))),
            return_exceptions=True,
        )
        for answer in found:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineLost):
                raise answer
        failures = [str(answer) for answer in found if isinstance(answer, EngineLost)]
        if failures:
            raise EngineLost("; ".join(failures))
        return add_stats([answer for answer in found if isinstance(answer, Stats)])

    async def _ping_rank(self, number: int, timeout_s: float) -> Stats:
        rank = self._ranks[number]
        if rank.lost is not None:
            raise EngineLost(f"rank {number} is lost: {rank.lost}")
        try:
            return await rank.channel.ping(timeout_s)
        except EngineLost as error:
            where = self._group.where(number)
            raise EngineLost(f"rank {number} did not answer ({where}): {error}") from error

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceOutput, None]:
        """Yield outputs of all sequences until each has a finish reason or was aborted.

        A request goes to the rank with the most room. Before its first output it may move: to a
        rank with less to do, or away from one that is lost.
        """
        num_moves = num_losses = 0
        while True:
            number = self._choose(request)
            has_begun, is_movable = False, num_moves < MAX_MOVES
            try:
                async with aclosing(self._submit_to(number, request, is_movable)) as outputs:
                    async for output in outputs:
                        has_begun = True
                        yield output
                return
            except RequestRecalled:
                num_moves += 1
                logger.info("request %s leaves the queue of rank %d", request.request_id, number)
            except EngineLost as error:
                num_losses += 1
                if has_begun or num_losses == MAX_TRIES:
                    raise EngineLost(f"rank {number} was lost: {error}") from error

    def abort_answer(self, request_id: str, index: int) -> None:
        """End one answer of a live request, on whichever rank it is."""
        for rank in self._ranks:
            rank.channel.abort_answer(request_id, index)

    async def _submit_to(
        self, number: int, request: Submit, is_movable: bool
    ) -> AsyncGenerator[SequenceOutput, None]:
        rank, num_tokens = self._ranks[number], expected_tokens(request)
        rank.num_tokens += num_tokens
        if is_movable:
            rank.queued[request.request_id] = request
        try:
            async with aclosing(rank.channel.submit(request)) as outputs:
                async for output in outputs:
                    rank.queued.pop(request.request_id, None)
                    yield output
        finally:
            rank.queued.pop(request.request_id, None)
            rank.num_tokens -= num_tokens

    def _choose(self, request: Submit) -> int:
        """Take the rank where the request fits and the fewest tokens lie; ties in turn."""
        count = len(self._ranks)
        self._num_routed += 1
        order = [(self._num_routed + i) % count for i in range(count)]
        alive = [n for n in order if not self._lost_reason(n)]
        if not alive:
            raise EngineLost("no rank is alive: " + "; ".join(self._describe_lost()))
        num_tokens = expected_tokens(request)

        def load(number: int) -> tuple[bool, int]:
            rank = self._ranks[number]
            total = rank.num_tokens + num_tokens
            return total > rank.capacity_tokens, total

        return min(alive, key=load)

    def _describe_lost(self) -> list[str]:
        reasons = [(n, self._lost_reason(n)) for n in range(len(self._ranks))]
        return [f"rank {n}: {reason}" for n, reason in reasons if reason]

    def _lost_reason(self, number: int) -> str | None:
        """Return why a rank takes no request; its channel knows before the watch does."""
        rank = self._ranks[number]
        return rank.lost or rank.channel.failure

    # -- the watch ------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Look at the ranks now and then. What fails once (no descriptors, no space) is tried
        again at the next turn."""
        last_error = ""
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                self._look()
            except GroupLost as error:
                self._failure = str(error)
                logger.error("%s", error)
                return
            except Exception as error:
                if str(error) != last_error:
                    logger.exception("a look at the ranks failed and is repeated")
                last_error = str(error)

    def _look(self) -> None:
        for number, rank in enumerate(self._ranks):
            if rank.lost is None and (reason := self._why_lost(number)) is not None:
                self._lose(number, reason)
        self._move_queued()

    def _why_lost(self, number: int) -> str | None:
        return self._group.why_lost(number) or self._ranks[number].channel.failure

    def _lose(self, number: int, reason: str) -> None:
        """Fail what a lost rank had begun, and begin to replace it."""
        rank = self._ranks[number]
        self._group.remove(number, reason)
        rank.lost = reason
        logger.error("rank %d is lost: %s", number, reason)
        rank.channel.fail(reason)
        task = asyncio.create_task(self._replace(number))
        self._replacing[number] = task
        task.add_done_callback(lambda _: self._replacing.pop(number, None))

    async def _replace(self, number: int) -> None:
        await self._ranks[number].stack.aclose()
        loop = asyncio.get_running_loop()
        try:
            await retry_start(
                lambda: loop.run_in_executor(self._threads, self._group.replace_rank, number),
                f"rank {number}",
            )
        except GroupLost as error:
            self._ranks[number].lost = self._failure = str(error)
            return
        self._ranks[number] = await self._open(number)
        logger.info("rank %d is back", number)

    def _move_queued(self) -> None:
        """Ask ranks with a queue to give back requests that another one could begin at once."""
        idle = [r for r in self._ranks if r.lost is None and _has_room(r)]
        for rank in self._ranks:
            if rank.lost is None and idle and _num_queued(rank) and rank not in idle:
                for request_id in list(rank.queued)[-MAX_MOVES_AT_ONCE * len(idle) :]:
                    rank.channel.recall(request_id)


def _num_queued(rank: _Rank) -> int:
    """Return how many wait for a slot; another rank would have to compile a grammar again."""
    stats = rank.channel.stats
    return stats.num_waiting - stats.num_compiling


def _has_room(rank: _Rank) -> bool:
    stats = rank.channel.stats
    num_running = stats.num_running + len(rank.queued)
    has_tokens = rank.num_tokens + EXPECTED_TOKENS <= rank.capacity_tokens
    return not _num_queued(rank) and num_running < rank.channel.info.max_num_seqs and has_tokens


def expected_tokens(request: Submit) -> int:
    """Return the cache rows that a request is expected to take."""
    limit = request.params.max_tokens
    answer = EXPECTED_TOKENS if limit is None else min(limit, EXPECTED_TOKENS)
    return len(request.prompt_token_ids) + answer * request.num_sequences
