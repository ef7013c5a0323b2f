"""Which drafts stand, and from which distribution the tokens come then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from whalepod.kernels.reference import ReferenceKernels
from whalepod.server.engine.runner import count_accepted

P = torch.tensor([0.40, 0.25, 0.15, 0.15, 0.05])
Q = torch.tensor([0.30, 0.40, 0.10, 0.10, 0.10])
NUM_DRAWS = 200_000
CRITICAL = 18.47
"""The chi-square value of 4 degrees of freedom that is exceeded with a probability of 0.001."""


def noise(stream: int, width: int = 5, num_draws: int = NUM_DRAWS) -> Tensor:
    """Return Gumbel noise of many sequences at one position."""
    seeds_B = torch.arange(num_draws) * 7_919 + stream * 1_000_003
    return ReferenceKernels().gumbel_noise(seeds_B, torch.full((num_draws,), 5), width)


def draw(p_V: Tensor, stream: int) -> Tensor:
    return (p_V.log() + noise(stream)).argmax(dim=-1)


def chi_square(found: Tensor, expected_p: Tensor) -> float:
    counts = torch.bincount(found, minlength=len(expected_p)).double()
    expected = expected_p.double() * len(found)
    return float(((counts - expected) ** 2 / expected).sum())


def by_coupling(p_V: Tensor, q_V: Tensor) -> tuple[Tensor, Tensor]:
    return draw(q_V, 1), draw(p_V, 1)  # the same noise


@pytest.mark.parametrize(
    ("drafts", "choices", "expected"),
    [
        ((), (4,), 0),
        ((4,), (4, 5), 1),
        ((4,), (3, 5), 0),
        ((4, 5, 6), (4, 7, 6, 8), 1),
        ((4, 5, 6), (4, 5, 6, 8), 3),
    ],
)
def test_drafts_stand_up_to_the_first_that_was_not_chosen(
    drafts: tuple[int, ...], choices: tuple[int, ...], expected: int
) -> None:
    assert count_accepted(drafts, choices) == expected


@pytest.mark.parametrize(
    "q_V", [Q, P, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), torch.full((5,), 0.2)]
)
def test_tokens_come_from_the_models_distribution(q_V: Tensor) -> None:
    _, choices_B = by_coupling(P, q_V)
    assert chi_square(choices_B, P) < CRITICAL


def test_coupling_accepts_somewhat_less() -> None:
    drafts_B, choices_B = by_coupling(P, Q)
    accepted = float((drafts_B == choices_B).float().mean())
    overlap, union = torch.minimum(P, Q).sum(), torch.maximum(P, Q).sum()
    assert float(overlap / union) - 0.01 < accepted < 0.80  # Gumbel-max: at least the Jaccard share


def test_a_token_that_cannot_be_is_never_chosen() -> None:
    p_V = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    _, choices_B = by_coupling(p_V, Q)
    assert int(choices_B.max()) == 1
