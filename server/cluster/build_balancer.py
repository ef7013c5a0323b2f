"""Puts together what moves experts between the ranks of a group (`--enable-eplb`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from whalepod.ep_comm.dispatcher import OnProgress
from whalepod.ep_comm.eplb.balancer import BalancerRegions, ExpertBalancer, reserve
from whalepod.ep_comm.eplb.config import BalancerConfig
from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.eplb.policy import Ints
from whalepod.ep_comm.eplb.trace import TraceFile
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.symmetric_heap import SymmetricHeap
from whalepod.server.build_model import Checkpoint
from whalepod.server.cluster.rank_assignment import RankAssignment
from whalepod.server.config import EplbConfig
from whalepod.server.errors import StartupError


@dataclass(frozen=True, slots=True)
class Balancing:
    """What the balancing of experts needs of the heap, and of the model."""

    slots: Slots
    regions: BalancerRegions


def plan_balancing(
    checkpoint: Checkpoint, assignment: RankAssignment, heap: SymmetricHeap
) -> Balancing | None:
    """Reserve what moving experts needs; None without --enable-eplb."""
    config, gate = checkpoint.config, checkpoint.config.gate
    if not checkpoint.engine_config.eplb.enable_eplb or gate is None:
        return None
    slots = Slots(
        num_experts=gate.num_experts,
        num_physical=heap.config.num_experts,
        num_ranks=assignment.num_ranks,
        num_groups=gate.num_groups,
        num_nodes=assignment.num_ranks // assignment.plan.ranks_per_node,
    )
    inner, hidden = config.moe_intermediate_size, config.hidden_size
    one = torch.zeros(1, 2 * inner, hidden, dtype=checkpoint.dtype)
    packed = checkpoint.kernels.pack_experts(one, one.new_zeros(1, hidden, inner))
    slot_bytes = sum(part.nbytes for part in checkpoint.kernels.packed_parts(packed)[0])
    num_layers = config.num_layers - config.num_dense_layers + config.num_mtp_layers
    return Balancing(slots, reserve(heap.layout, slots, num_layers, slot_bytes))


def new_balancer(
    checkpoint: Checkpoint,
    assignment: RankAssignment,
    balancing: Balancing,
    group: Group,
    num_tokens: int,
    note: OnProgress,
) -> ExpertBalancer:
    """Return this rank's balancer.

    group       a view of its own
    num_tokens  the most of a rank in a step
    """
    eplb = checkpoint.engine_config.eplb
    return ExpertBalancer(
        BalancerConfig(
            window_steps=eplb.eplb_window_steps,
            interval_steps=eplb.eplb_interval_steps,
            min_gain=eplb.eplb_min_gain,
            step_bytes=eplb.eplb_step_bytes,
            choice=eplb.eplb_replica_choice,
        ),
        balancing.slots,
        group,
        balancing.regions,
        checkpoint.kernels,
        num_tokens=num_tokens,
        on_loads=_open_trace(eplb, assignment, balancing.slots),
        on_progress=note,
    )


def _open_trace(
    eplb: EplbConfig, assignment: RankAssignment, slots: Slots
) -> Callable[[int, int, Ints], None]:
    """Return what writes the loads of all ranks down: rank 0 does, a restarted one anew."""
    if eplb.eplb_trace is None or assignment.rank:
        return lambda step, num_steps, loads_LE: None
    path = Path(eplb.eplb_trace + assignment.life_suffix)
    try:
        return TraceFile(path, slots.num_groups).write
    except OSError as error:
        raise StartupError(f"cannot write --eplb-trace {path}: {error.strerror}") from error
