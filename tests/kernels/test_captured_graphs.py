"""Steps that are recorded and repeated give what the same operations give one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.cpu.captured_graphs import MAX_GRAPHS, Arena


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A few operations on an input that stays where it is."""

    def __init__(self, num_threads: int = 2) -> None:
        self.kernels = CpuKernels(num_threads=num_threads)
        self.x = random(3, 64)
        self.norm = random(64, seed=1)
        self.mlp = self.kernels.pack_gated_mlp(random(96, 64, seed=2), random(64, 48, seed=3))
        self.num_calls = 0

    def compute(self) -> Tensor:
        self.num_calls += 1
        normed = self.kernels.rms_norm(self.x, self.norm, 1e-6)
        return self.kernels.gated_mlp(normed, self.mlp, add_to_TH=self.x)

    def replay(self, key: object = 0) -> Tensor:
        return self.kernels.replay(key, torch.float32, self.compute)


def test_a_repeated_step_sees_new_values_and_calls_nothing() -> None:
    layer = Layer()
    for seed in range(5):
        layer.x.copy_(random(3, 64, seed=seed))
        actual = layer.replay()
        num_calls = layer.num_calls
        assert torch.equal(actual, layer.compute())
    assert num_calls == 2 + 4, "two repeats called `compute`, and four comparisons"


def test_a_result_outlives_the_next_repeat() -> None:
    layer = Layer(num_threads=1)
    results = []
    for seed in range(4):
        layer.x.copy_(random(3, 64, seed=seed))
        results.append((layer.replay(), layer.compute()))
    for actual, expected in results:
        assert torch.equal(actual, expected)


def test_what_is_eager_is_called_each_time_between_the_kernels() -> None:
    layer, calls = Layer(), []

    def compute() -> Tensor:
        normed = layer.kernels.rms_norm(layer.x, layer.norm, 1e-6)

        def halve() -> Tensor:
            calls.append(0)
            row = layer.kernels.rms_norm(normed, layer.norm, 1e-6)  # not a part of the program
            return torch.stack([row[0] / 2, *normed[1:]])

        halved = layer.kernels.eager(halve, normed)
        return layer.kernels.gated_mlp(halved, layer.mlp, add_to_TH=normed)

    for seed in range(5):
        layer.x.copy_(random(3, 64, seed=seed))
        actual = layer.kernels.replay("key", torch.float32, compute)
        assert len(calls) == 2 * seed + 1
        assert torch.equal(actual, compute())


def test_a_step_whose_eager_part_raises_can_be_replayed_again() -> None:
    layer, fails = Layer(), [True]

    def eager() -> Tensor:
        if fails[0]:
            raise ValueError("another rank is gone")
        return layer.x * 2

    def compute() -> Tensor:
        y = layer.kernels.eager(eager, layer.x)
        return layer.kernels.gated_mlp(y, layer.mlp, add_to_TH=y)

    for fail in (True, True, False, True, False, True, False, False):
        fails[0] = fail
        if fail:
            with pytest.raises(ValueError, match="gone"):
                layer.kernels.replay("key", torch.float32, compute)
        else:
            actual = layer.kernels.replay("key", torch.float32, compute)
            assert torch.equal(actual, compute())


def test_graphs_are_bounded_and_made_again() -> None:
    layer = Layer()
    expected = layer.compute()
    for _ in range(2):
        for key in range(MAX_GRAPHS + 3):
            for _ in range(3):
                assert torch.equal(layer.replay(key), expected)


def test_memory_is_given_out_again_only_once_no_view_holds_it() -> None:
    arena = Arena()
    first = arena.new((4, 8), torch.float32)
    address, view = first.data_ptr(), first[1:, ::2]
    del first
    second = arena.new((4, 8), torch.float32)
    assert second.data_ptr() != address
    del view
    assert arena.new((8, 4), torch.int32).data_ptr() == address
    assert address % 64 == 0


def test_memory_that_grows_later_leaves_graphs_whole() -> None:
    layer = Layer()
    expected = layer.compute()
    layer.replay()
    layer.replay()
    big = layer.kernels.pack_gated_mlp(random(2048, 64), random(64, 1024))
    layer.kernels.gated_mlp(random(300, 64), big)  # larger scratch
    assert torch.equal(layer.replay(), expected)
