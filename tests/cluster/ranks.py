"""Ranks of one group inside the test's process, over loopback, with a script of what they get."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch

from tests.engine.fakes import collect
from tests.mtp.speculating import EOS, make_models
from tests.mtp.test_module import MtpOracleWeights
from whalepod.ep_comm.dispatcher import Dispatcher, ModeName, OnProgress, Timeouts, ignore_progress
from whalepod.ep_comm.eplb.balancer import BalancerRegions, ExpertBalancer, reserve
from whalepod.ep_comm.eplb.config import BalancerConfig
from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.routed_experts import ExpertPlacement
from whalepod.ep_comm.symmetric_heap import GroupConfig, SymmetricHeap
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup
from whalepod.kernels.cpu import CpuKernels
from whalepod.models.cache import LatentCache
from whalepod.models.config import ModelConfig, parse_config
from whalepod.models.deepseek_v3 import DeepseekV3
from whalepod.models.presets import preset_config
from whalepod.models.weights import DummyWeights, Weights
from whalepod.mtp.depth import Depth, FixedDepth
from whalepod.mtp.drafter import Drafter
from whalepod.mtp.module import MtpModule
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.cluster.group_member import GroupMember, HealthMonitor
from whalepod.server.cluster.lockstep import Lockstep
from whalepod.server.cluster.lockstep_engine import LockstepEngine
from whalepod.server.cluster.membership_store import FolderStore, Membership, MembershipStore
from whalepod.server.cluster.rank_record import record_bytes
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.speculation import Speculator
from whalepod.server.messages import EngineInfo, Rejected, ToEngine

Answers = dict[tuple[str, int], SequenceOutput]
TIMEOUT_MS = 1000.0
"""Of the loopback's virtual clock."""
MAX_DRAFTS = 4


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One rank's engine. `is_guessing`: a model whose MTP layer is often right, else v3-nano."""

    is_guessing: bool = False
    new_depth: Callable[[], Depth] | None = lambda: FixedDepth(2)
    num_blocks: int = 32
    max_num_seqs: int = 6
    chunk: int = 40
    max_model_len: int = 400
    decode_tokens: int = 30
    return_timeout_s: float = 1e9
    balancing: BalancerConfig | None = None
    num_redundant: int = 0


class SharedWeights(MtpOracleWeights):
    """Of several ranks: each leaves what the others take."""

    def leave(self, name: str) -> None:
        assert name in self._tensors, name
        self._left.discard(name)


@dataclass(frozen=True)
class Shape:
    """A model's configuration, and where its tensors come from."""

    config: ModelConfig
    new_weights: Callable[[], Weights]


@cache
def shape_of(is_guessing: bool) -> Shape:
    if is_guessing:
        models = make_models()
        return Shape(models.model.config, lambda: SharedWeights(models.oracle, models.mtp_oracle))
    config = parse_config(preset_config("v3-nano"))
    return Shape(config, lambda: DummyWeights(config, dtype=torch.float32, seed=0))


def new_core(
    settings: Settings, placement: ExpertPlacement | None, depth: Depth | None
) -> EngineCore:
    """Build an engine whose experts live where `placement` says; unwritten cache rows are NaN."""
    shape, kernels = shape_of(settings.is_guessing), CpuKernels(is_invariant=True)
    weights = shape.new_weights()
    model = DeepseekV3(
        shape.config, weights, kernels, max_positions=settings.max_model_len,
        absorbed_max_query_tokens=1 << 30, placement=placement,
    )  # fmt: skip
    cache = LatentCache(
        num_layers=shape.config.num_layers + 1,
        num_blocks=settings.num_blocks,
        row_width=shape.config.cache_row_width,
        dtype=torch.float32,
        device="cpu",
    )
    cache.rows_LPBC.fill_(torch.nan)
    batches = BatchBuilder(
        max_tokens=settings.chunk,
        max_rows=settings.max_num_seqs,
        max_model_len=settings.max_model_len,
    )
    sampler, speculator = Sampler(kernels), None
    if settings.new_depth is not None:
        module = MtpModule(model, weights, kernels, placement=placement)
        hidden_size = shape.config.hidden_size
        drafter = Drafter(module, cache, batches.build, hidden_size=hidden_size)
        speculator = Speculator(drafter, sampler)
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.chunk,
            max_model_len=settings.max_model_len,
        ),
        num_blocks=settings.num_blocks,
        eos_token_ids=frozenset({EOS}),
        num_lookback_tokens=int(speculator is not None),
    )
    info = EngineInfo(
        model_type="deepseek_v3", dtype="float32", kernels="invariant",
        max_model_len=settings.max_model_len, vocab_size=shape.config.vocab_size,
        num_blocks=settings.num_blocks, block_tokens=64, max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.chunk, weights_bytes=0, kv_bytes_per_token=1,
        load_seconds=0.0,
    )  # fmt: skip
    runner = Runner(model, cache, sampler, batches, speculator)
    return EngineCore(scheduler, runner, info, depth=depth)


def group_heap(num_ranks: int, settings: Settings) -> SymmetricHeap:
    config = shape_of(settings.is_guessing).config
    assert config.gate is not None
    config_of_group = GroupConfig(
        num_ranks=num_ranks,
        ranks_per_node=num_ranks,
        num_experts=config.gate.num_experts + settings.num_redundant,
        top_k=config.gate.num_experts_per_token,
        hidden=config.hidden_size,
        decode_tokens=settings.decode_tokens,
        max_tokens=settings.chunk,
        dtype="float32",
        is_exact=True,
    )
    return SymmetricHeap(config_of_group, record_bytes(num_ranks))


def new_slots(num_ranks: int, settings: Settings) -> Slots:
    gate = shape_of(settings.is_guessing).config.gate
    assert gate is not None
    num_physical = gate.num_experts + settings.num_redundant
    return Slots(
        num_experts=gate.num_experts, num_physical=num_physical, num_ranks=num_ranks,
        num_groups=gate.num_groups,
    )  # fmt: skip


def reserve_balancing(heap: SymmetricHeap, settings: Settings) -> BalancerRegions | None:
    if settings.balancing is None:
        return None
    config, kernels = shape_of(settings.is_guessing).config, CpuKernels(is_invariant=True)
    sizes = 2 * config.moe_intermediate_size, config.hidden_size, config.moe_intermediate_size
    packed = kernels.pack_experts(torch.zeros(1, *sizes[:2]), torch.zeros(1, *sizes[1:]))
    slot_bytes = sum(part.nbytes for part in kernels.packed_parts(packed)[0])
    slots = new_slots(heap.config.num_ranks, settings)
    return reserve(heap.layout, slots, config.num_layers + 1, slot_bytes)


class ModeLog(Dispatcher):
    """Remembers the modes of all steps."""

    log: list[ModeName | None]

    def enter(self, mode: ModeName | None) -> None:
        self.__dict__.setdefault("log", []).append(mode)
        super().enter(mode)


class MemoryStore(FolderStore):
    """Memberships of ranks that share a process."""

    def __init__(self) -> None:
        self._memberships = [Membership(0)]

    def newest(self) -> Membership:
        return self._memberships[-1]

    def is_newest(self, epoch: int) -> bool:
        return self._memberships[-1].epoch <= epoch

    def commit(self, membership: Membership) -> bool:
        if membership.epoch != len(self._memberships):
            return False
        self._memberships.append(membership)
        return True


@dataclass
class Rank:
    """One rank of the group, as its thread sees it."""

    transport: Transport
    engine: LockstepEngine
    core: EngineCore
    member: GroupMember
    dispatcher: ModeLog
    answers: Answers = field(default_factory=dict)
    refused: dict[str, Rejected] = field(default_factory=dict)
    num_turns: int = 0

    def turn(self, messages: Sequence[ToEngine] = ()) -> None:
        """Do what the loop of an engine's process does once."""
        for reply in self.engine.receive(messages):
            if isinstance(reply, Rejected):
                self.refused[reply.request_id] = reply
        outputs = self.engine.step()
        if outputs is not None:
            collect(self.answers, outputs)
        self.num_turns += 1
        if self.engine.may_sleep:
            self.member.pause(5.0)


def new_rank(
    transport: Transport,
    heap: SymmetricHeap,
    store: MembershipStore,
    settings: Settings,
    *,
    note: OnProgress = ignore_progress,
    described: Mapping[str, str] | None = None,
    regions: BalancerRegions | None = None,
) -> Rank:
    """Build a rank and let it join."""
    watch = HealthMonitor(store)
    kernels = CpuKernels(is_invariant=True)
    group = Group(transport, is_gone=watch)
    balancer = None
    if settings.balancing is not None and regions is not None:
        balancer = ExpertBalancer(
            settings.balancing, new_slots(group.num_ranks, settings),
            Group(transport, is_gone=watch), regions, kernels, num_tokens=settings.chunk,
        )  # fmt: skip
    dispatcher = ModeLog(
        group,
        kernels,
        heap.exchanges(group, poison_unused=True),
        timeouts=Timeouts(TIMEOUT_MS),
        on_progress=note,
        balancer=balancer,
    )
    core = new_core(settings, dispatcher, None)
    max_drafts = MAX_DRAFTS if settings.new_depth else 0
    member = GroupMember(
        heap,
        dispatcher,
        Lockstep(max_low_latency_tokens=heap.config.decode_tokens, new_depth=settings.new_depth),
        watch,
        described or {"settings": "alike"},
    )
    engine = LockstepEngine(
        core,
        member,
        dispatcher,
        max_num_drafts=max_drafts,
        return_timeout_s=settings.return_timeout_s,
        clock=lambda: transport.now_ms() / 1e3,
    )
    rank = Rank(transport, engine, core, member, dispatcher)
    member.join()
    return rank


Script = Callable[[Rank], Sequence[ToEngine]]
"""What a rank receives before its next turn."""


def run_group(
    num_ranks: int,
    settings: Settings,
    script: Script,
    *,
    seed: int | None = None,
    notes: Mapping[int, OnProgress] | None = None,
    max_turns: int = 4000,
    dead: Collection[int] = (),
) -> list[Rank | Exception]:
    """Run all ranks until `script` has nothing more for any (raises StopIteration) and all idle.

    dead  ranks that end with an exception, and leave without a word: their aborts are lost
    """
    heap = group_heap(num_ranks, settings)
    regions = reserve_balancing(heap, settings)
    group = LoopbackGroup(num_ranks, heap.layout.num_bytes, seed=seed)
    for transport in group.transports:
        heap.layout.poison(transport.heap)
    store = MemoryStore()
    is_done = [False] * num_ranks

    def program(transport: Transport) -> Rank:
        note = (notes or {}).get(transport.rank, ignore_progress)
        rank = new_rank(transport, heap, store, settings, note=note, regions=regions)
        if transport.rank in dead:
            rank.dispatcher.abort = lambda: None  # type: ignore[method-assign]
        try:
            while not all(is_done):
                assert rank.num_turns < max_turns, f"rank {transport.rank} does not come to an end"
                try:
                    messages = script(rank)
                except StopIteration:
                    messages, is_done[transport.rank] = (), rank.engine.may_sleep
                rank.turn(messages)
            rank.core.check()
        except BaseException as error:
            if transport.rank in dead:
                raise RuntimeError("it is dead") from error
            raise
        finally:
            is_done[transport.rank] = True
        return rank

    return group.run(program)


def alone(settings: Settings) -> EngineCore:
    """Return an engine with all experts and without drafts: what a group must equal."""
    return new_core(replace(settings, new_depth=None), None, None)
