"""Puts one rank of a group together, and brings it into the group."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path

import torch

from whalepod.ep_comm.group import Group
from whalepod.ep_comm.handshake import HandshakeError, describe
from whalepod.ep_comm.interface import ExpertPlacement
from whalepod.ep_comm.parallel import Dispatcher, Note, Patience
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.traffic import GroupHeap, Traffic, warm_up
from whalepod.kernels.interface import Kernels
from whalepod.models.config import ModelConfig
from whalepod.mtp.depth import Depth
from whalepod.scheduler.config import SchedulerConfig
from whalepod.server.build import build_engine
from whalepod.server.build_speculation import new_depth
from whalepod.server.cluster.lockstep import Lockstep
from whalepod.server.cluster.member import GroupMember, Watch
from whalepod.server.cluster.membership import FolderStore, MembershipStore
from whalepod.server.cluster.progress import ProgressBoard
from whalepod.server.cluster.rank import LockstepEngine
from whalepod.server.cluster.record import record_bytes
from whalepod.server.cluster.seat import Bells, Meeting, RankConfig
from whalepod.server.cluster.store import GroupStore, connect
from whalepod.server.cluster.store_membership import StoreMembership
from whalepod.server.cluster.waiting import Waiting
from whalepod.server.config import EngineConfig
from whalepod.server.errors import GroupLost, StartupError
from whalepod.server.launch import START_TIMEOUT_S
from whalepod.server.messages import EngineInfo, StepOutputs, ToEngine, ToGateway
from whalepod.server.open_transport import open_transport

RESERVED_OUTPUT_TOKENS = 256
"""What admission keeps room for on each rank of a group, unless told otherwise: a rank that has to
preempt delays all of them."""
JOIN_POLL_S = 0.02
"""How often a rank looks whether all others are there."""

logger = logging.getLogger(__name__)
_ROW_DTYPES: dict[torch.dtype, RowDtype] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
}


@dataclass(slots=True)
class _Comm:
    """What a rank talks to the others with; made while its model is loaded."""

    control: Group
    heap: GroupHeap
    dispatcher: Dispatcher


class RankBuilder:
    """Builds the engine of one rank. `wrap_note` is for tests that break a rank somewhere."""

    def __init__(
        self,
        config: RankConfig,
        should_stop: Callable[[], bool],
        wrap_note: Callable[[Note], Note] = lambda note: note,
    ) -> None:
        self._seat = config.seat
        self._config = _settle(config)
        folder = Path(config.seat.folder)
        self._bells = Bells(config.seat.bell_descriptors, config.seat.bell)
        self._board = ProgressBoard(folder, config.seat.num_ranks)
        self._store = _connect(config.seat.meeting)
        self._watch = Watch(self._memberships(folder), should_stop)
        self._note = wrap_note(self._write_progress)
        self._num_steps = 0
        self._comm: _Comm | None = None

    def build(self) -> RankEngine:
        """Load the model and join the group. Raises StartupError."""
        config = self._config
        core = build_engine(config, self._new_placement)
        core.reseed(f"{config.source.seed}/{self._seat.rank}")
        assert self._comm is not None
        comm = self._comm
        max_depth = _max_depth(config) if core.runner.makes_drafts else 0
        traffic = comm.heap.traffic
        member = GroupMember(
            comm.control,
            comm.heap,
            comm.dispatcher,
            Lockstep(
                max_low_latency_tokens=traffic.decode_tokens, new_depth=self._depth_maker(max_depth)
            ),
            self._watch,
            describe(
                traffic=traffic,
                heap=comm.heap.layout.digest(),
                source=config.source,
                speculation=config.speculation,
                batch_invariant=config.device.batch_invariant,
                kernels=core.info.kernels,
                num_drafts=max_depth,
            ),
            timeout_ms=1e3 * config.parallel.dispatch_timeout_s,
            ring=self._bells.ring,
            note=self._note,
        )
        engine = LockstepEngine(
            core,
            member,
            comm.dispatcher,
            max_num_drafts=max_depth,
            return_timeout_s=config.parallel.rank_return_timeout_s,
        )
        return RankEngine(
            replace(core.info, transport=self._seat.transport),
            engine,
            member,
            self._bells,
            begin_step=self._begin_step,
            leave=comm.control.transport.close,
        )

    def _memberships(self, folder: Path) -> MembershipStore:
        if self._store is None:
            return FolderStore(folder)
        return StoreMembership(self._store, self._bells.ring_own)

    def _depth_maker(self, max_depth: int) -> Callable[[], Depth] | None:
        return partial(new_depth, self._config.speculation) if max_depth else None

    def _begin_step(self) -> None:
        self._num_steps += 1
        self._board.write(self._seat.rank, self._num_steps, "")

    def _write_progress(self, layer: str, operation: str) -> None:
        self._board.write(self._seat.rank, self._num_steps, _place_in_step(layer, operation))

    def _new_placement(
        self, config: ModelConfig, limits: SchedulerConfig, kernels: Kernels, dtype: torch.dtype
    ) -> ExpertPlacement:
        num_ranks = self._seat.num_ranks
        gate = config.gate
        if gate is None:
            raise StartupError(
                f"--expert-parallel-size {num_ranks}: {config.model_type} has no experts to spread"
            )
        if gate.num_experts % num_ranks:
            raise StartupError(
                f"--expert-parallel-size {num_ranks} does not divide the model's "
                f"{gate.num_experts} experts: choose one that does"
            )
        decode_tokens = limits.max_num_seqs * (1 + _max_depth(self._config))
        traffic = Traffic(
            num_ranks=num_ranks,
            ranks_per_node=self._seat.ranks_per_node,
            num_experts=gate.num_experts,
            num_choices=gate.num_experts_per_token,
            hidden=config.hidden_size,
            decode_tokens=min(decode_tokens, limits.max_num_batched_tokens),
            max_tokens=limits.max_num_batched_tokens,
            dtype=_ROW_DTYPES[dtype],
            is_exact=self._config.device.batch_invariant,
        )
        warm_up(traffic)
        heap = GroupHeap(traffic, record_bytes(num_ranks))
        timeout_ms = 1e3 * self._config.parallel.dispatch_timeout_s
        transport = open_transport(
            self._seat,
            heap.layout.num_bytes,
            patience_ms=timeout_ms / 2,
            on_arrival=self._bells.ring_own,
        )
        group = Group(transport, is_gone=self._watch)
        dispatcher = Dispatcher(
            group,
            kernels,
            heap.modes(group),
            num_experts=gate.num_experts,
            patience=Patience(timeout_ms),
            note=self._note,
        )
        self._comm = _Comm(Group(transport, is_gone=self._watch), heap, dispatcher)
        return dispatcher


@lru_cache(maxsize=4096)
def _place_in_step(layer: str, operation: str) -> str:
    return f"{operation} of {layer}" if operation else ""


def _connect(meeting: Meeting | None) -> GroupStore | None:
    if meeting is None:
        return None
    return connect(meeting.host, meeting.port, meeting.attempt, meeting.address)


def _max_depth(config: EngineConfig) -> int:
    return 0 if config.speculation.is_off else config.speculation.max_depth


def _settle(config: RankConfig) -> EngineConfig:
    """Return the engine's configuration with what is different on each rank."""
    engine, rank = config.engine, config.seat.rank
    limits = engine.scheduler
    if not limits.reserve_output_tokens:
        limits = replace(limits, reserve_output_tokens=RESERVED_OUTPUT_TOKENS)
    record = f"{engine.record}.rank{rank}" if engine.record else None
    return replace(engine, scheduler=limits, record=record)


class RankEngine:
    """A `LockstepEngine` as the loop of a process runs it: woken by bells, watched on a board."""

    def __init__(
        self,
        info: EngineInfo,
        engine: LockstepEngine,
        member: GroupMember,
        bells: Bells,
        *,
        begin_step: Callable[[], None],
        leave: Callable[[], None],
    ) -> None:
        """begin_step: called before each; leave: called once, when this rank has stopped."""
        self.info = info
        self._engine = engine
        self._member = member
        self._bells = bells
        self._begin_step = begin_step
        self._leave = leave

    @property
    def is_stopping(self) -> bool:
        return self._engine.is_stopping

    @property
    def may_sleep(self) -> bool:
        return self._engine.may_sleep

    def join(self, should_stop: Callable[[], bool]) -> None:
        """Become a member and wait until all are; the launcher's patience is the limit.

        Raises StartupError.
        """
        self._member.join()
        waiting = Waiting(START_TIMEOUT_S)
        try:
            while not self._engine.is_ready:
                if should_stop():
                    raise StartupError("told to stop before all ranks were there")
                self._engine.step()
                waiting.goes_on(f"ranks {self._member.missing} to load their weights")
                time.sleep(JOIN_POLL_S)
        except (HandshakeError, GroupLost) as error:
            raise StartupError(str(error)) from error

    def receive(self, messages: Sequence[ToEngine]) -> Sequence[ToGateway]:
        self._bells.clear()
        return self._engine.receive(messages)

    def step(self) -> StepOutputs | None:
        self._begin_step()
        return self._engine.step()

    def on_idle(self) -> None:
        self._engine.on_idle()

    def close(self) -> None:
        self._engine.close()
        self._leave()
