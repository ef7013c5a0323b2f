"""Ownership of experts: a rank loads its own and adds up only those."""

from __future__ import annotations

import pytest
import torch

from tests.models.oracle import OracleWeights, make_oracle
from whalepod.ep_comm.routed_experts import LocalPlacement
from whalepod.kernels.interface import GateConfig
from whalepod.kernels.reference import ReferenceKernels
from whalepod.models.config import ModelConfig, parse_config
from whalepod.models.moe import MixtureOfExperts

PREFIX = "model.layers.1.mlp"


class CountingWeights(OracleWeights):
    """Remembers which tensors were taken and left."""

    taken: set[str]
    given_up: set[str]

    def take(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        self.__dict__.setdefault("taken", set()).add(name)
        return super().take(name, shape, dtype)

    def leave(self, name: str) -> None:
        self.__dict__.setdefault("given_up", set()).add(name)
        super().leave(name)


def build(experts: range) -> tuple[MixtureOfExperts, CountingWeights]:
    oracle = make_oracle()
    config: ModelConfig = parse_config(oracle.config.to_diff_dict())
    assert isinstance(config.gate, GateConfig)
    weights = CountingWeights(oracle)
    kernels = ReferenceKernels()
    placement = LocalPlacement(kernels, config.gate.num_experts, experts)
    mixture = MixtureOfExperts(config, config.gate, weights, PREFIX, kernels, placement)
    return mixture, weights


def test_a_rank_takes_only_its_experts_and_leaves_the_others() -> None:
    _, weights = build(range(2, 5))
    taken = {name.split(".")[5] for name in weights.taken if ".experts." in name}
    left = {name.split(".")[5] for name in weights.given_up}
    assert (taken, left) == ({"2", "3", "4"}, {"0", "1", "5", "6", "7"})


def test_parts_of_the_experts_have_their_share_of_the_bytes() -> None:
    parts = [build(r)[0].expert_bytes for r in (range(8), range(2), range(2, 8))]
    assert parts[0] == parts[1] + parts[2] == 4 * parts[1] > 0


@pytest.mark.parametrize("num_tokens", [0, 1, 33])
def test_parts_of_the_experts_add_up_to_the_whole(num_tokens: int) -> None:
    x_TH = torch.randn(num_tokens, 48, generator=torch.Generator().manual_seed(0))
    whole, first, second = (build(r)[0] for r in (range(8), range(3), range(3, 8)))
    shared = whole(x_TH) * 0 if whole._shared is None else whole._shared(x_TH)
    torch.testing.assert_close(first(x_TH) + second(x_TH) - shared, whole(x_TH))
    if num_tokens > 1:
        assert not torch.equal(first(x_TH), whole(x_TH))
