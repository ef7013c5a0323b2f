"""What is copied when: budgets, peers, checksums, and staging that is thrown away."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.ep_comm.groups import TIMEOUT_MS, WithoutQuiet, run_faulty, run_loopback
from whalepod.ep_comm.eplb.migration import (
    Copy,
    LayerMove,
    LayerPlan,
    MigrationError,
    SlotBytes,
    StagingRegions,
    plan_copies,
    reserve,
    schedule,
)
from whalepod.ep_comm.eplb.placement import Slots
from whalepod.ep_comm.eplb.plan import plan_placement
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import results_of
from whalepod.kernels.cpu import CpuKernels

SLOTS = Slots(num_experts=12, num_physical=16, num_ranks=4, num_nodes=2)
SLOT_BYTES = 4 * (5 + 3)


def drawn_placements(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    first_LP = SLOTS.first()[None]
    old_LP, new_LP = (
        plan_placement(first_LP, random.zipf(1.5, (1, 12)).astype(float), SLOTS) for _ in range(2)
    )
    return old_LP[0], new_LP[0]


def test_copies_come_from_as_near_as_they_can() -> None:
    slots = Slots(num_experts=3, num_physical=8, num_ranks=4, num_nodes=2)
    old_P = np.array([0, 1, 0, 2, 0, 1, 0, 1])
    new_P = np.array([0, 0, 1, 2, 0, 2, 0, 1])
    assert plan_copies(old_P, new_P, slots) == [Copy(0, 1), Copy(1, 2), Copy(3, 5)]
    spread_P = np.array([0, 0, 0, 0, 1, 2, 1, 2])
    to_first_P = np.array([1, 2, 0, 0, 1, 2, 1, 2])
    assert plan_copies(spread_P, to_first_P, slots) == [Copy(4, 0), Copy(7, 1)]  # two senders
    with pytest.raises(MigrationError, match="expert 2 is in no slot"):
        plan_copies(np.array([0, 1, 0, 1]), np.array([0, 1, 0, 2]), Slots(
            num_experts=3, num_physical=4, num_ranks=2))  # fmt: skip


@pytest.mark.parametrize("budget", [1, 7, 32, 100, 10_000])
@pytest.mark.parametrize("seed", range(6))
def test_item_20_no_step_is_over_the_budget_and_no_rank_has_two_peers(
    budget: int, seed: int
) -> None:
    copies = plan_copies(*drawn_placements(seed), SLOTS)
    steps = schedule(copies, SLOTS, SLOT_BYTES, budget)
    done = dict.fromkeys(copies, 0)
    for step in steps:
        num_bytes, peers = [0] * 4, [set() for _ in range(4)]
        for (source, target), begin, end in step:
            assert begin == done[Copy(source, target)]
            done[Copy(source, target)] = end
            a, b = source // 4, target // 4
            for rank in {a, b}:
                num_bytes[rank] += end - begin
            if a != b:
                peers[a].add(b)
                peers[b].add(a)
        assert 0 < max(num_bytes) <= budget
        assert max(map(len, peers)) <= 1
    assert {*done.values()} <= {SLOT_BYTES}


def content_of(experts: Sequence[int]) -> list[torch.Tensor]:
    """Return two parts, `[S, 5]` and `[S, 3]`, whose rows are made from the expert's number."""
    wide = torch.stack([torch.arange(5.0) + 100 * e for e in experts])
    return [wide, torch.stack([torch.arange(3.0) - 7 * e for e in experts])]


def prepare(
    transport: Transport, staging: StagingRegions, old_P: np.ndarray, new_P: np.ndarray, budget: int
) -> tuple[LayerMove, list[torch.Tensor]]:
    group = Group(transport)
    parts = content_of(old_P[SLOTS.of_rank(transport.rank)].tolist())
    move = LayerMove(
        group, staging, SLOTS, SlotBytes(parts), LayerPlan(5, 2, old_P, new_P), budget
    )  # fmt: skip
    return move, parts


@pytest.mark.parametrize("budget", [5, 32, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_item_56_item_59_every_slot_gets_its_expert_in_place_and_not_before_the_swap(
    seed: int, budget: int
) -> None:
    old_P, new_P = drawn_placements(seed)
    heap = HeapLayout(4)
    staging = reserve(heap, SLOTS, SLOT_BYTES)

    def program(transport: Transport) -> None:
        move, parts = prepare(transport, staging, old_P, new_P, budget)
        before, mine = [part.clone() for part in parts], SLOTS.of_rank(transport.rank)
        while not move.is_staged:
            move.run()
            assert move.step_bytes <= budget
            transport.barrier(TIMEOUT_MS)  # the exchange of records
            assert all(torch.equal(a, b) for a, b in zip(before, parts, strict=True))
        addresses = [part.data_ptr() for part in parts]
        move.commit()
        assert [part.data_ptr() for part in parts] == addresses
        for part, wanted in zip(parts, content_of(new_P[mine].tolist()), strict=True):
            assert torch.equal(part, wanted)

    run_loopback(heap, program, ranks_per_node=2)
    results_of(run_faulty(heap, program, seed=seed, ranks_per_node=2))


def test_bytes_that_come_after_the_step_are_noticed() -> None:
    """A mutation: a rank says that its bytes are there before they are."""
    old_P, new_P = drawn_placements(1)
    heap = HeapLayout(4)
    staging = reserve(heap, SLOTS, SLOT_BYTES)

    def program(transport: Transport) -> None:
        move, _ = prepare(transport, staging, old_P, new_P, 32)
        while not move.is_staged:
            move.run()
            transport.barrier(TIMEOUT_MS)

    found = run_faulty(heap, program, seed=3, wrapper=WithoutQuiet, ranks_per_node=2)
    assert any(isinstance(one, MigrationError) for one in found), found


@pytest.mark.parametrize("is_int8", [False, True])
def test_item_55_a_moved_expert_computes_what_it_did_scales_included(is_int8: bool) -> None:
    kernels = CpuKernels(num_threads=1, is_invariant=True, is_int8=is_int8)
    random = torch.Generator().manual_seed(2)
    gate_up = torch.randn(3, 64, 64, generator=random).bfloat16()
    down = torch.randn(3, 64, 32, generator=random).bfloat16()
    packed = kernels.pack_experts(gate_up, down)
    x_SH = torch.randn(2, 64, generator=random).bfloat16()
    wanted = [kernels.expert_rows(x_SH, torch.tensor([e, e]), packed) for e in range(3)]
    content = SlotBytes(kernels.packed_parts(packed)[0])
    content.write(0, content.read(2))
    found = [kernels.expert_rows(x_SH, torch.tensor([e, e]), packed) for e in range(3)]
    for expert, slot in ((2, 0), (1, 1), (2, 2)):
        assert torch.equal(found[slot], wanted[expert])


@pytest.mark.parametrize("part", ["data", "headers"])
def test_what_is_damaged_on_the_way_is_noticed_before_the_swap(part: str) -> None:
    old_P, new_P = drawn_placements(0)
    heap = HeapLayout(4)
    staging = reserve(heap, SLOTS, SLOT_BYTES)

    def program(transport: Transport) -> str:
        move, _ = prepare(transport, staging, old_P, new_P, 1000)
        try:
            while not move.is_staged:
                move.run()
                transport.barrier(TIMEOUT_MS)
                getattr(staging, part).view(transport.heap).bitwise_xor_(1)
                transport.barrier(TIMEOUT_MS)
        except MigrationError as error:
            transport.barrier(TIMEOUT_MS)
            return str(error)
        return ""

    receives = (old_P != new_P).reshape(4, 4).any(axis=1)
    assert receives.any()
    errors = run_loopback(heap, program, ranks_per_node=2)
    assert [bool(error) for error in errors] == receives.tolist()
    wanted = "migration, layer, expert and checksum should be (5, 2, "
    assert all(wanted in error for error in errors if error)
