"""Groups of ranks for tests, and inputs that every rank can make again from the seed alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from hypothesis import settings
from torch import Tensor

from tests.ep_comm.faulty import FaultPlan, FaultyTransport
from tests.equality import assert_same_bits
from whalepod.ep_comm.config import ExchangeConfig, ExchangeRegions, reserve
from whalepod.ep_comm.heap import HeapLayout
from whalepod.ep_comm.transport.interface import Transport
from whalepod.ep_comm.transport.loopback import LoopbackGroup, results_of

T = TypeVar("T")

TIMEOUT_MS = 60_000.0
"""Of the loopback's virtual clock, or of a real one that a passing test never waits for."""


def num_examples(quick: int) -> int:
    """Return how many seeds a randomised test tries: `quick`, or 1,000 in the long profile."""
    return quick if settings().max_examples <= 100 else 1000


@dataclass(frozen=True, slots=True)
class Inputs:
    """What one rank dispatches: x `[T, H]`, ids int64 `[T, K]`, weights f32 `[T, K]`."""

    x_TH: Tensor
    ids_TK: Tensor
    weights_TK: Tensor


def make_inputs(
    seed: int,
    num_ranks: int,
    num_experts: int,
    num_choices: int,
    hidden: int,
    max_tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    skew: bool = False,
    masked: float = 0.1,
) -> list[Inputs]:
    """Return all ranks' inputs. T differs by rank, often 0 or the most; some choices are -1.

    skew  every token chooses the same experts
    """
    random = torch.Generator().manual_seed(seed)
    inputs = []
    for _ in range(num_ranks):
        drawn = int(torch.randint(-2, max_tokens + 3, (1,), generator=random))
        num_tokens = min(max(drawn, 0), max_tokens)
        scores_TE = torch.rand(num_tokens, num_experts, generator=random)
        if skew:
            scores_TE = torch.arange(num_experts).float().expand(num_tokens, -1)
        ids_TK = scores_TE.argsort(dim=1)[:, :num_choices].contiguous()
        ids_TK[torch.rand(ids_TK.shape, generator=random) < masked] = -1
        x_TH = torch.randn(num_tokens, hidden, generator=random).to(dtype)
        inputs.append(Inputs(x_TH, ids_TK, torch.rand(ids_TK.shape, generator=random)))
    return inputs


def make_heap(config: ExchangeConfig) -> tuple[HeapLayout, ExchangeRegions]:
    """Return a layout that holds one exchange, and its regions."""
    heap = HeapLayout(config.num_ranks)
    return heap, reserve(heap, config, "exchange")


def run_loopback(
    heap: HeapLayout,
    program: Callable[[Transport], T],
    *,
    ranks_per_node: int | None = None,
    seed: int | None = None,
) -> list[T]:
    """Run on all ranks of a loopback group whose heaps are poisoned; raise what a rank raises."""
    group = LoopbackGroup(heap.num_ranks, heap.num_bytes, ranks_per_node=ranks_per_node, seed=seed)
    for transport in group.transports:
        heap.poison(transport.heap)
    return results_of(group.run(program))


def run_faulty(
    heap: HeapLayout,
    program: Callable[[Transport], T],
    *,
    seed: int,
    plan: FaultPlan | None = None,
    wrapper: type[FaultyTransport] = FaultyTransport,
    ranks_per_node: int | None = None,
) -> list[T | Exception]:
    """Run on all ranks over transports that delay, reorder and tear; exceptions are values."""
    group = LoopbackGroup(heap.num_ranks, heap.num_bytes, ranks_per_node=ranks_per_node, seed=seed)
    for transport in group.transports:
        heap.poison(transport.heap)
    chosen = plan or FaultPlan()
    return group.run(program, lambda inner: wrapper(inner, seed, chosen))


def assert_faults_change_nothing(
    heap: HeapLayout,
    program: Callable[[Transport], Sequence[Tensor]],
    seed: int,
    *,
    ranks_per_node: int | None = None,
) -> None:
    """Check that all ranks get the same bits over a transport that delays, reorders and tears."""
    faulty = results_of(run_faulty(heap, program, seed=seed, ranks_per_node=ranks_per_node))
    plain = run_loopback(heap, program, ranks_per_node=ranks_per_node)
    for expected, actual in zip(plain, faulty, strict=True):
        for a, b in zip(expected, actual, strict=True):
            assert_same_bits(a, b)


class WithoutFences(FaultyTransport):
    """A mutation: fences are forgotten."""

    def fence(self, rank: int) -> None:
        pass


class WithoutQuiet(FaultyTransport):
    """A mutation: the source of a put is written again before it was delivered."""

    def quiet(self) -> None:
        pass


MUTATIONS: list[type[FaultyTransport]] = [WithoutFences, WithoutQuiet]
"""What a faulty transport must catch."""
