"""Batch-invariant mode: the bits of a text's logits depend on that text alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from tests.equality import assert_same_bits
from tests.models.oracle import YARN, Sequences, make_model, make_oracle, random_ids
from whalepod.kernels.cpu import CpuKernels
from whalepod.kernels.interface import Packed
from whalepod.models.canary import NotInvariantError, canary
from whalepod.models.deepseek_v3 import DeepseekV3

VOCAB = 96


def make_invariant_model() -> DeepseekV3:
    return make_model(make_oracle(rope_parameters=YARN), CpuKernels(is_invariant=True))


def run_alone(model: DeepseekV3, text: list[int], chunk: int) -> Tensor:
    return Sequences(model, [text]).run(chunk)[0]


@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_the_chunk_size_changes_no_bit(chunk: int) -> None:
    model, text = make_invariant_model(), random_ids(210, VOCAB)
    assert_same_bits(run_alone(model, text, 210), run_alone(model, text, chunk))


@pytest.mark.parametrize("num_neighbours", [1, 2, 15, 40])
def test_neighbours_change_no_bit(num_neighbours: int) -> None:
    model = make_invariant_model()
    texts = [random_ids(5 + 7 * n, VOCAB, seed=n) for n in range(num_neighbours)]
    texts.insert(num_neighbours // 2, random_ids(70, VOCAB, seed=99))
    together = Sequences(model, texts, seed=5).run(9)
    for text, logits in zip(texts, together, strict=True):
        assert_same_bits(run_alone(model, text, 1000), logits, f"length {len(text)}")


def test_rows_of_a_shared_prefix_give_the_same_bits() -> None:
    model, text = make_invariant_model(), random_ids(100, VOCAB)
    first = Sequences(model, [text])
    cold = first.run(100)[0]

    second = Sequences(model, [text])
    second.blocks[0] = [first.blocks[0][0], second.blocks[0][1]]
    second.cache = copy.deepcopy(first.cache)
    second.cache.rows_LPBC[:, first.blocks[0][1]] = torch.nan
    second.num_computed[0] = 64
    assert_same_bits(cold[64:], second.step([36]))


def test_the_canary_passes_where_the_mode_holds() -> None:
    canary(make_invariant_model())


def test_the_canary_raises_where_bits_depend_on_the_batch() -> None:
    kernels = CpuKernels(is_invariant=True)
    linear = kernels.linear

    def coupled(x_TK: Tensor, weight: Packed) -> Tensor:
        """Round as the number of rows says, as libraries' GEMMs do."""
        return linear(x_TK, weight) * (1.0 + 1e-6 * (len(x_TK) % 2))

    kernels.linear = coupled
    with pytest.raises(NotInvariantError, match="without --batch-invariant"):
        canary(make_model(make_oracle(), kernels))
