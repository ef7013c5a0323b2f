"""One rank's part in balancing experts: its slots, the tables to all, and moves between steps.

All ranks call `adopt` for each membership and `before_step` before each step, with the reports of
all; whatever is decided follows from those alone, so all decide alike. Where experts lie is never
remembered for another rank: with each membership every rank says what is in its own slots.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whalepod.ep_comm import all_gather
from whalepod.ep_comm.all_gather import NUMBERS_PER_EPOCH, AllGather, GatherRegions
from whalepod.ep_comm.eplb import migration
from whalepod.ep_comm.eplb.config import BalancerConfig
from whalepod.ep_comm.eplb.dispatch_map import columns, look_up, new_table
from whalepod.ep_comm.eplb.migration import LayerMove, LayerPlan, SlotBytes, StagingRegions
from whalepod.ep_comm.eplb.placement import Slots, balancedness, count_replicas
from whalepod.ep_comm.eplb.plan import next_part, plan_placement
from whalepod.ep_comm.eplb.policy import Ints, Loads
from whalepod.ep_comm.eplb.recorder import LoadRecorder
from whalepod.ep_comm.eplb.reports import BalancerStats, Moved, Phase, PlanRecord, Report, agree
from whalepod.ep_comm.group import CallStatus, Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.routed_experts import LoadExpert
from whalepod.kernels.interface import Kernels, Packed

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalancerRegions:
    """The balancer's parts of the heap."""

    loads: GatherRegions
    contents: GatherRegions
    staging: StagingRegions


def reserve(heap: HeapLayout, slots: Slots, num_layers: int, slot_bytes: int) -> BalancerRegions:
    """Reserve what balancing needs, the same on every rank; at most `num_layers` have experts."""
    width = max(slots.num_experts, slots.num_physical)
    return BalancerRegions(
        loads=all_gather.reserve(heap, 8 * (1 + num_layers * width), "eplb.loads"),
        contents=all_gather.reserve(heap, 8 * (1 + num_layers * slots.per_rank), "eplb.contents"),
        staging=migration.reserve(heap, slots, slot_bytes),
    )


class BalancedLayer:
    """One layer's slots on this rank, and the way to those of all."""

    def __init__(self, balancer: ExpertBalancer, index: int, content: SlotBytes) -> None:
        self._balancer, self.index, self.content = balancer, index, content
        self.table_EC = torch.empty(0, 0, dtype=torch.int64)

    def slots_of(self, ids_TK: Tensor) -> Tensor:
        """Return the slot that serves each choice of an expert."""
        return look_up(self.table_EC, ids_TK, self._balancer.columns_T1)

    def count(self, count_S: Tensor) -> None:
        """Note how many tokens each slot of this rank got."""
        self._balancer.recorder.count(self.index, count_S)


class ExpertBalancer:
    """Owns what is in this rank's slots, and follows what is in the others'.

    control      a view of the group of its own
    num_tokens   the most tokens of a rank in a step
    on_loads     hears (step, steps covered, loads `[L, E]` of all ranks) at each interval
    on_progress  hears what this rank is at: ("experts", operation), see `Dispatcher`
    """

    def __init__(
        self,
        config: BalancerConfig,
        slots: Slots,
        control: Group,
        regions: BalancerRegions,
        kernels: Kernels,
        *,
        num_tokens: int,
        on_loads: Callable[[int, int, Ints], None] = lambda step, num_steps, loads_LE: None,
        on_progress: Callable[[str, str], None] = lambda layer, operation: None,
    ) -> None:
        self.config, self.slots, self.stats = config, slots, BalancerStats()
        self.columns_T1 = columns(num_tokens, control.rank)
        self.layers: list[BalancedLayer] = []
        self.recorder = LoadRecorder(np.empty((0, slots.per_rank), np.int64), slots.num_experts, 1)
        self.contents_LP: Ints = np.empty((0, slots.num_physical), np.int64)
        """What is in all slots; -1 in those of lost ranks."""
        self.regions = regions
        self._control, self._kernels = control, kernels
        self._loads = AllGather(control, regions.loads, "loads")
        self._contents = AllGather(control, regions.contents, "contents of slots")
        self._on_loads, self._on_progress = on_loads, on_progress
        self._load_expert: list[LoadExpert] = []
        self._mine = slots.of_rank(control.rank)
        self.dead: frozenset[int] = frozenset()
        """Ranks that are lost: no table leads to them."""
        self._was_complete = False
        self._to_load: list[tuple[int, int]] = []
        self._step = self._number = self._base = 0
        self._wanted_LP: Ints | None = None
        self._planned_LP: Ints | None = None
        self.move: LayerMove | None = None
        """Of the layer that moves."""
        self.version = 0
        """Rises with whatever people may want to see."""
        self._is_asking = self._has_failed = False

    # -- loading the model ------------------------------------------------------------------------

    @property
    def owned(self) -> list[int]:
        """Return the experts in this rank's slots at the start."""
        first: list[int] = self.slots.first()[self._mine].tolist()
        return first

    def add_layer(self, packed: Packed, load_expert: LoadExpert) -> BalancedLayer:
        """Take the packed experts of the next layer: one in each slot, in order of `owned`."""
        content = SlotBytes(self._kernels.packed_parts(packed)[0])
        layer = BalancedLayer(self, len(self.layers), content)
        self.layers.append(layer)
        self._load_expert.append(load_expert)
        self.contents_LP = np.tile(self.slots.first(), (len(self.layers), 1))
        self._start_recording()
        return layer

    def _start_recording(self) -> None:
        self.recorder = LoadRecorder(
            self.contents_LP[:, self._mine], self.slots.num_experts, self.config.window_steps
        )

    # -- memberships ------------------------------------------------------------------------------

    @property
    def serves(self) -> bool:
        """Return whether every expert is on a live rank, or will be when ranks have loaded it."""
        return bool((count_replicas(self.contents_LP, self.slots.num_experts) > 0).all())

    def adopt(self, missing: Collection[int], number: int, deadline_ms: float) -> CallStatus:
        """Learn what is in the slots of all ranks but the missing ones, and forget what moved.

        number  above those of earlier memberships, the same on all ranks

        Experts that were lost with a rank go to spare slots, if there are enough; `must_wait` reads
        them. If the status that is returned is not ok, call this again.
        """
        self._forget_move()
        self._step = self._number = 0
        self._base, self.dead = number * NUMBERS_PER_EPOCH, frozenset(missing)
        own_LS = self.contents_LP[:, self._mine].copy()
        for layer, slot in self._to_load:  # planned, and not read yet
            own_LS[layer, slot - self._mine.start] = -1
        self._control.mask(missing)
        self._contents.resume(number)
        record = _record(self.regions.contents, int(self._was_complete), own_LS)
        found, status = self._contents.gather(record, deadline_ms)
        if status.must_stop:
            return status
        contents_LP = np.full_like(self.contents_LP, -1)
        for rank, values in found.items():
            held = values[1 : 1 + own_LS.size].numpy().reshape(own_LS.shape)
            contents_LP[:, self.slots.of_rank(rank)] = held
        was_complete = any(int(values[0]) for values in found.values())
        self._was_complete = was_complete or not missing
        self._to_load = []
        if was_complete:
            self._place_lost(contents_LP)
        self.contents_LP = contents_LP
        self.version += 1
        self._start_recording()
        self._make_tables(range(len(self.layers)))
        return status

    def _place_lost(self, contents_LP: Ints) -> None:
        """Give experts that are nowhere slots of experts that are elsewhere, too."""
        is_live_P = np.repeat(
            [rank not in self.dead for rank in range(self.slots.num_ranks)], self.slots.per_rank
        )
        for layer, content_P in enumerate(contents_LP):
            count_E = count_replicas(content_P[None], self.slots.num_experts)[0]
            for expert in np.flatnonzero(count_E == 0):
                replicas_P = np.where(content_P >= 0, count_E[content_P], len(content_P))
                slot = int(np.where(is_live_P, replicas_P, 0).argmax())
                if replicas_P[slot] < 2 or not is_live_P[slot]:
                    return
                if content_P[slot] >= 0:
                    count_E[content_P[slot]] -= 1
                content_P[slot], count_E[expert] = expert, 1
                if self._mine.start <= slot < self._mine.stop:
                    self._to_load.append((layer, slot))

    def _load_lost(self) -> None:
        """Read the experts of one layer that were lost with a rank, if there are such."""
        due = [entry for entry in self._to_load if entry[0] == self._to_load[0][0]]
        for layer, slot in due:
            data = self.read_expert(layer, int(self.contents_LP[layer, slot]))
            self.layers[layer].content.write(slot - self._mine.start, data)
            self.stats.num_loaded += 1
        self._to_load = self._to_load[len(due) :]

    def read_expert(self, layer: int, expert: int) -> Tensor:
        """Return the bytes of an expert's slot, from where the model came from."""
        packed = self._load_expert[layer](expert)
        return SlotBytes(self._kernels.packed_parts(packed)[0]).read(0)

    # -- steps ------------------------------------------------------------------------------------

    def ask(self, wanted_LP: Ints | None = None) -> None:
        """Have experts placed before the next step: as this says, None: as the loads say."""
        if wanted_LP is not None:
            counts_LE = count_replicas(wanted_LP, self.slots.num_experts)
            if wanted_LP.shape != self.contents_LP.shape or not counts_LE.all():
                raise ValueError(
                    f"a placement must be {list(self.contents_LP.shape)} with each of "
                    f"{self.slots.num_experts} experts in every layer; got {list(wanted_LP.shape)}"
                )
        self._wanted_LP, self._is_asking = wanted_LP, True

    def report(self) -> Report:
        """Return what all ranks must hear before the next step."""
        phase, move = Phase.IDLE, self.move
        if self._has_failed:
            phase = Phase.FAILED
        elif self._to_load:
            phase = Phase.LOADING
        elif move is not None:
            phase = Phase.STAGED if move.is_staged else Phase.MOVING
        place = (self._step, self._number, -1 if move is None else move.plan.layer)
        planned = b"" if self._planned_LP is None else self._planned_LP.tobytes()
        digest = zlib.crc32(self.contents_LP.tobytes() + planned + repr(place).encode())
        return Report(phase, digest, int(self._is_asking))

    def must_wait(self, reports: Iterable[Report]) -> bool:
        """Return whether a rank reads experts that were lost; this one's next layer is read."""
        is_loading = any(report.phase == Phase.LOADING for report in reports)
        if is_loading and self._to_load:
            self._load_lost()
        return is_loading

    def before_step(self, reports: Sequence[Report], deadline_ms: float) -> None:
        """Do what is due before a step, on all ranks alike.

        What goes wrong here is told with the next report, and all forget the move.
        """
        start_s = time.monotonic()
        self._step += 1
        self.recorder.end_step()
        move = self.move
        if move is not None and all(r.phase == Phase.STAGED for r in reports) and agree(reports):
            self._commit(move)  # what fails here leaves a slot half written: it ends this rank
        else:
            self._prepare(reports, deadline_ms)
        self._on_progress("", "")
        self.stats.stall_ms += 1e3 * (time.monotonic() - start_s)

    def _prepare(self, reports: Sequence[Report], deadline_ms: float) -> None:
        if any(report.phase == Phase.FAILED for report in reports) or not agree(reports):
            self.stats.num_failures += 1
            self._forget_move()
            return
        is_due = self._step % self.config.interval_steps == 0
        try:
            if self.move is not None:
                self._on_progress("experts", "copy")
                self.move.run()
                most = max(self.stats.most_step_bytes, self.move.step_bytes)
                self.stats.most_step_bytes = most
            elif is_due or any(report.is_asking for report in reports):
                self._plan(deadline_ms)
        except Exception:
            logger.exception("rank %d: moving experts failed", self._control.rank)
            self._has_failed = True

    def _plan(self, deadline_ms: float) -> None:
        """Gather loads, and begin to move if that is worth it."""
        self._on_progress("experts", "gather of loads")
        loads_LE, wanted_LP = self.recorder.loads(), self._wanted_LP
        self._is_asking, self._wanted_LP = False, None
        self._number += 1
        values = loads_LE if wanted_LP is None else wanted_LP
        self._control.mask(self.dead)  # who was late before may be here now
        self._loads.resume(self._base + self._number)
        record = _record(self.regions.loads, int(wanted_LP is not None), values)
        found, status = self._loads.gather(record, deadline_ms)
        if status.must_stop:
            raise migration.MigrationError(f"loads were not gathered: {status}")
        asked = [values for _, values in sorted(found.items()) if int(values[0])]
        shape = len(self.layers), self.slots.num_physical
        if asked:
            planned_LP = asked[0][1 : 1 + shape[0] * shape[1]].numpy().reshape(shape).copy()
            planned_LP[self.contents_LP < 0] = -1
        else:
            total = sum(v[1 : 1 + loads_LE.size].numpy() for v in found.values())
            total_LE: Ints = np.asarray(total).reshape(loads_LE.shape)
            self.stats.loads_LE = total_LE
            self._on_loads(self._step, self.config.window_steps, total_LE)
            planned_LP = plan_placement(
                self.contents_LP, total_LE, self.slots,
                dead=self.dead, min_gain=self.config.min_gain,
            )  # fmt: skip
        self._begin(planned_LP)

    def _begin(self, planned_LP: Ints) -> None:
        loads_LE: Loads = np.ones((len(planned_LP), self.slots.num_experts))
        if self.stats.loads_LE is not None:
            loads_LE = self.stats.loads_LE
        before, after = (
            float(balancedness(placed_LP, loads_LE, self.slots.num_ranks).mean())
            for placed_LP in (self.contents_LP, planned_LP)
        )
        num_changes = int((planned_LP != self.contents_LP).sum())
        self.stats.num_plans += 1
        self.stats.moved = []
        self.stats.plans.append(PlanRecord(self._step, before, after, num_changes))
        self.version += 1
        self._planned_LP = planned_LP
        self._next_layer()

    def _next_layer(self) -> None:
        """Begin with the next part of a layer that changes, or end."""
        assert self._planned_LP is not None
        changed_L = (self._planned_LP != self.contents_LP).any(axis=1)
        if not changed_L.any():
            self._forget_move()
            self._make_tables(range(len(self.layers)))
            return
        layer = int(changed_L.argmax())
        old_P = self.contents_LP[layer]
        max_changes = self.config.step_bytes // self.regions.staging.slot_bytes
        new_P = next_part(old_P, self._planned_LP[layer], self.slots, max(max_changes, 1))
        self.move = LayerMove(
            self._control, self.regions.staging, self.slots, self.layers[layer].content,
            LayerPlan(self._base + self._number, layer, old_P, new_P),
            self.config.step_bytes,
        )  # fmt: skip

    def _commit(self, move: LayerMove) -> None:
        """Swap a layer, on all ranks before the same step. The next one is begun after that: a
        quicker rank must not write into what this one still reads."""
        layer, new_P, per_rank = move.plan.layer, move.plan.new_P, self.slots.per_rank
        self._on_progress("experts", "swap")
        move.commit()
        self.recorder.fold([layer])
        changed_P = self.contents_LP[layer] != new_P
        self.contents_LP[layer] = new_P
        self._make_tables([layer])
        self.stats.num_swaps += 1
        self.stats.moved += [
            Moved(layer, int(new_P[target]), source // per_rank, target // per_rank)
            for source, target in move.copies
        ]
        num_changed = int(changed_P[self._mine].sum())
        self.stats.num_slots_changed += num_changed
        self.stats.most_swapped = max(self.stats.most_swapped, num_changed)
        self.version += 1
        self.stats.bytes_sent += move.sent_bytes
        self._next_layer()

    def _forget_move(self) -> None:
        self.move = self._planned_LP = None
        self._has_failed = False

    def _make_tables(self, layers: Iterable[int]) -> None:
        loads_LE = self.stats.loads_LE
        even_E = np.ones(self.slots.num_experts)
        for layer in layers:
            load_E = even_E if loads_LE is None else loads_LE[layer]
            self.layers[layer].table_EC = new_table(
                self.contents_LP[layer], load_E, self.slots, self.config.choice,
                self._control.rank,
            )  # fmt: skip


def _record(regions: GatherRegions, first: int, values: Ints) -> Tensor:
    record = torch.zeros(regions.slots.record_bytes // 8, dtype=torch.int64)
    record[0] = first
    record[1 : 1 + values.size] = torch.from_numpy(np.ascontiguousarray(values)).flatten()
    return record
