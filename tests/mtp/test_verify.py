"""Which drafts stand, and from which distribution the tokens come then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from whalepod.kernels.reference import ReferenceKernels
from whalepod.mtp import verify
from whalepod.mtp.verify import choose_by_rejection, count_accepted, uniform_of_gumbel

P = torch.tensor([0.40, 0.25, 0.15, 0.15, 0.05])
Q = torch.tensor([0.30, 0.40, 0.10, 0.10, 0.10])
NUM_DRAWS = 200_000
CRITICAL = {4: 18.47, 24: 51.18}
"""Chi-square values that are exceeded with a probability of 0.001, by degrees of freedom."""


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


def by_rejection(p_V: Tensor, q_V: Tensor) -> tuple[Tensor, Tensor]:
    """Return (drafts, choices) of many independent sequences."""
    drafts_B = draw(q_V, 1)
    choices_B = verify.choose_by_rejection(
        drafts_B,
        p_V.log().expand(NUM_DRAWS, -1),
        q_V.log().expand(NUM_DRAWS, -1),
        uniform_of_gumbel(noise(2, width=1))[:, 0],
        noise(3),
    )
    return drafts_B, choices_B


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


@pytest.mark.parametrize("rule", [by_rejection, by_coupling])
@pytest.mark.parametrize(
    "q_V", [Q, P, torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), torch.full((5,), 0.2)]
)
def test_tokens_come_from_the_models_distribution(
    rule: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], q_V: Tensor
) -> None:
    _, choices_B = rule(P, q_V)
    assert chi_square(choices_B, P) < CRITICAL[4]


def test_rejection_accepts_as_often_as_the_distributions_overlap() -> None:
    drafts_B, choices_B = by_rejection(P, Q)
    accepted = (drafts_B == choices_B).float().mean()
    assert float(torch.minimum(P, Q).sum()) == pytest.approx(0.80)
    assert float(accepted) == pytest.approx(0.80, abs=0.004)


def test_coupling_accepts_somewhat_less() -> None:
    drafts_B, choices_B = by_coupling(P, Q)
    accepted = float((drafts_B == choices_B).float().mean())
    overlap, union = torch.minimum(P, Q).sum(), torch.maximum(P, Q).sum()
    assert float(overlap / union) - 0.01 < accepted < 0.80  # Gumbel-max: at least the Jaccard share


def test_a_token_that_cannot_be_is_never_chosen() -> None:
    p_V = torch.tensor([0.5, 0.5, 0.0, 0.0, 0.0])
    _, choices_B = by_rejection(p_V, Q)
    assert int(choices_B.max()) == 1
    assert chi_square(choices_B[:, None].flatten(), p_V[:2]) < CRITICAL[4]


def test_pairs_of_tokens_come_from_the_models_distribution() -> None:
    """Two drafts in a row, the second given the first: the run that stands, and one token more."""
    p2_VV = torch.stack([P.roll(shift) for shift in range(5)])
    q2_VV = torch.stack([Q.roll(-shift) for shift in range(5)])
    first_B, chosen_B = by_rejection(P, Q)
    second_B = (q2_VV[first_B].log() + noise(4)).argmax(dim=-1)
    choice2_B = choose_by_rejection(
        second_B,
        p2_VV[first_B].log(),
        q2_VV[first_B].log(),
        uniform_of_gumbel(noise(5, width=1))[:, 0],
        noise(6),
    )
    stands_B = chosen_B == first_B
    # where the first draft fell, the next step draws from the model given what came instead
    alone_B = (p2_VV[chosen_B].log() + noise(7)).argmax(dim=-1)
    pair_B = chosen_B * 5 + torch.where(stands_B, choice2_B, alone_B)
    assert chi_square(pair_B, (P[:, None] * p2_VV).flatten()) < CRITICAL[24]


# -- the tests above can fail -------------------------------------------------------------------


def always_accept(drafts_B: Tensor, *_: Tensor) -> Tensor:
    return drafts_B


def resample_from_p(
    drafts_B: Tensor, log_p_BV: Tensor, log_q_BV: Tensor, uniforms_B: Tensor, noise_BV: Tensor
) -> Tensor:
    """Forget to take the drafts' distribution off what is left."""
    ratio_B = (log_p_BV - log_q_BV).exp().gather(1, drafts_B[:, None])[:, 0]
    return torch.where(uniforms_B < ratio_B, drafts_B, (log_p_BV + noise_BV).argmax(dim=-1))


def reuse_the_drafts_noise(
    drafts_B: Tensor, log_p_BV: Tensor, log_q_BV: Tensor, uniforms_B: Tensor, noise_BV: Tensor
) -> Tensor:
    return choose_by_rejection(drafts_B, log_p_BV, log_q_BV, uniforms_B, noise(1))


@pytest.mark.parametrize("broken", [always_accept, resample_from_p, reuse_the_drafts_noise])
def test_a_broken_rule_is_found(
    broken: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "choose_by_rejection", broken)
    _, choices_B = by_rejection(P, Q)
    assert chi_square(choices_B, P) > CRITICAL[4]


def test_uniform_numbers_are_uniform() -> None:
    u = uniform_of_gumbel(noise(2, width=1))[:, 0].numpy()
    counts, _ = np.histogram(u, bins=5, range=(0.0, 1.0))
    assert (
        chi_square(torch.from_numpy(np.repeat(np.arange(5), counts)), torch.full((5,), 0.2)) < 18.47
    )
