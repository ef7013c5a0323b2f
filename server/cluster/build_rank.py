"""Puts one rank of a group together: connect, read the configuration, place, load."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from whalepod.ep_comm.dispatcher import Dispatcher, OnProgress, Timeouts
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.handshake import describe
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.symmetric_heap import GroupConfig, SymmetricHeap, warm_up
from whalepod.server.build import build_core, new_depth
from whalepod.server.build_model import Checkpoint, read_checkpoint, startup_errors
from whalepod.server.cluster.build_balancer import Balancing, new_balancer, plan_balancing
from whalepod.server.cluster.group_member import GroupMember, HealthMonitor
from whalepod.server.cluster.group_store import connect_library
from whalepod.server.cluster.lockstep import Lockstep
from whalepod.server.cluster.lockstep_engine import LockstepEngine
from whalepod.server.cluster.membership_store import (
    FolderStore,
    Membership,
    MembershipStore,
    StaticMembership,
)
from whalepod.server.cluster.open_transport import open_transport
from whalepod.server.cluster.progress_board import ProgressBoard, StepProgress
from whalepod.server.cluster.rank_assignment import RankAssignment
from whalepod.server.cluster.rank_record import record_bytes
from whalepod.server.config import EngineConfig
from whalepod.server.errors import StartupError

RESERVED_OUTPUT_TOKENS = 256
"""What admission keeps room for on each rank of a group, unless told otherwise: a rank that has to
preempt delays all of them."""
_ROW_DTYPES: dict[torch.dtype, RowDtype] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def build_rank(
    assignment: RankAssignment,
    should_stop: Callable[[], bool],
    wrap_note: Callable[[OnProgress], OnProgress] = lambda note: note,
) -> LockstepEngine:
    """Load this rank's experts, connected to the other ranks; `join` is to follow.

    wrap_note  for tests that break a rank somewhere

    Raises StartupError.
    """
    config, events = settle(assignment), assignment.events
    board = ProgressBoard(Path(assignment.folder), assignment.num_ranks)
    progress = StepProgress(board, assignment.rank)
    health = HealthMonitor(_open_memberships(assignment), should_stop)
    with startup_errors():
        checkpoint = read_checkpoint(config)
        exchanged = plan_exchange(checkpoint, assignment)
        heap = SymmetricHeap(exchanged, record_bytes(assignment.num_ranks))
        balancing = plan_balancing(checkpoint, assignment, heap)
        note = wrap_note(progress.note)
        dispatcher = _connect(checkpoint, assignment, heap, balancing, health, note)
        core = build_core(checkpoint, dispatcher)
    core.reseed(f"{config.source.seed}/{assignment.rank}")
    core.info = replace(core.info, transport=assignment.transport)
    max_depth = _max_depth(config) if core.runner.makes_drafts else 0
    described = describe(
        group=exchanged,
        heap=heap.layout.digest(),
        source=config.source,
        speculation=config.speculation,
        batch_invariant=config.device.batch_invariant,
        kernels=core.info.kernels,
        num_drafts=max_depth,
        eplb=config.eplb,
    )
    lockstep = Lockstep(
        max_low_latency_tokens=exchanged.decode_tokens,
        new_depth=partial(new_depth, config.speculation) if max_depth else None,
    )

    def begin_turn() -> None:
        events.clear()
        progress.begin_step()

    return LockstepEngine(
        core,
        GroupMember(heap, dispatcher, lockstep, health, described, wake_others=events.set_others),
        dispatcher,
        max_num_drafts=max_depth,
        return_timeout_s=config.parallel.rank_return_timeout_s,
        begin_turn=begin_turn,
    )


def plan_exchange(checkpoint: Checkpoint, assignment: RankAssignment) -> GroupConfig:
    """Return what the ranks exchange for this model. Raises StartupError if it cannot be spread."""
    config, num_ranks, gate = checkpoint.engine_config, assignment.num_ranks, checkpoint.config.gate
    if gate is None:
        raise StartupError(
            f"--expert-parallel-size {num_ranks}: {checkpoint.config.model_type} has no experts "
            "to spread"
        )
    num_redundant = config.eplb.num_redundant_experts
    num_slots = gate.num_experts + num_redundant
    if num_slots % num_ranks:
        redundant = f" and {num_redundant} redundant ones" if num_redundant else ""
        raise StartupError(
            f"--expert-parallel-size {num_ranks} does not divide the model's "
            f"{gate.num_experts} experts{redundant}: choose one that does"
        )
    limits = config.scheduler
    decode_tokens = limits.max_num_seqs * (1 + _max_depth(config))
    return GroupConfig(
        num_ranks=num_ranks,
        ranks_per_node=assignment.plan.ranks_per_node,
        num_experts=num_slots,
        top_k=gate.num_experts_per_token,
        hidden=checkpoint.config.hidden_size,
        decode_tokens=min(decode_tokens, limits.max_num_batched_tokens),
        max_tokens=limits.max_num_batched_tokens,
        dtype=_ROW_DTYPES[checkpoint.dtype],
        is_exact=config.device.batch_invariant,
    )


def _connect(
    checkpoint: Checkpoint,
    assignment: RankAssignment,
    heap: SymmetricHeap,
    balancing: Balancing | None,
    health: HealthMonitor,
    note: OnProgress,
) -> Dispatcher:
    """Return the placement of the experts over all ranks, connected to them where they must be."""
    timeout_ms = 1e3 * checkpoint.engine_config.parallel.dispatch_timeout_s
    warm_up(heap.config)  # before any rank waits for another
    transport = open_transport(
        assignment,
        heap.layout.num_bytes,
        patience_ms=timeout_ms / 2,
        on_arrival=assignment.events.set_own,
    )
    group, balancer = Group(transport, is_gone=health), None
    if balancing is not None:
        own, num_tokens = Group(transport, is_gone=health), heap.config.max_tokens
        balancer = new_balancer(checkpoint, assignment, balancing, own, num_tokens, note)
    return Dispatcher(
        group,
        checkpoint.kernels,
        heap.exchanges(group),
        timeouts=Timeouts(timeout_ms),
        on_progress=note,
        balancer=balancer,
    )


def _open_memberships(assignment: RankAssignment) -> MembershipStore:
    if not assignment.plan.is_spread:
        known = Membership(assignment.epoch, frozenset(assignment.members))
        return FolderStore(Path(assignment.folder), known)
    return StaticMembership(connect_library(assignment.plan), assignment.num_ranks)


def _max_depth(config: EngineConfig) -> int:
    return 0 if config.speculation.is_off else config.speculation.max_depth


def settle(assignment: RankAssignment) -> EngineConfig:
    """Return the engine's configuration with what is different on each rank."""
    engine, limits = assignment.engine, assignment.engine.scheduler
    if not limits.reserve_output_tokens:
        limits = replace(limits, reserve_output_tokens=RESERVED_OUTPUT_TOKENS)
    record = (
        f"{engine.record}.rank{assignment.rank}{assignment.life_suffix}" if engine.record else None
    )
    return replace(engine, scheduler=limits, record=record)
