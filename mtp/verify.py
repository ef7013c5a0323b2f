"""Which drafts stand. One rule for both kinds of acceptance: a draft stands iff the token chosen
at its position equals it.

- Coupling: the choice is the model's own, argmax(log p + g(seed, position)), whatever the draft is.
  The text is the same with and without drafts; drafts made with the same noise g agree often.
- Rejection (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): the choice is the
  draft with probability min(1, p / q), else a draw from max(p - q, 0), which never is the draft.

Greedy is the case without noise: the choice is the likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def count_accepted(drafts: Sequence[int], choices: Sequence[int]) -> int:
    """Count the drafts that stand: those before the first that was not chosen.

    `choices[i]` was chosen at the position of `drafts[i]`, given all drafts before it. The step
    yields `choices[: count + 1]`: what was chosen instead of the first wrong draft, or after the
    last right one, is a token of the answer too.
    """
    for count, draft in enumerate(drafts):
        if choices[count] != draft:
            return count
    return len(drafts)


def choose_by_rejection(
    drafts_B: Tensor, log_p_BV: Tensor, log_q_BV: Tensor, uniforms_B: Tensor, noise_BV: Tensor
) -> Tensor:
    """Choose a token at each draft's position, int64 `[B]`.

    drafts_B            int64, each drawn from its q
    log_p_BV, log_q_BV  f32, up to a constant per row; -inf: cannot be
    uniforms_B          f32 in (0, 1), independent of the draft and of `noise_BV`
    noise_BV            f32, independent standard Gumbel
    """
    p_BV, q_BV = log_p_BV.softmax(dim=-1), log_q_BV.softmax(dim=-1)
    p_B = p_BV.gather(1, drafts_B[:, None])[:, 0]
    q_B = q_BV.gather(1, drafts_B[:, None])[:, 0]
    accepted_B = uniforms_B * q_B < p_B
    residual_BV = (p_BV - q_BV).clamp_(min=0.0)
    # rounding may leave nothing where p = q: then p itself is as good
    residual_BV = torch.where(residual_BV.sum(dim=-1, keepdim=True) > 0, residual_BV, p_BV)
    instead_B = (residual_BV.log() + noise_BV).argmax(dim=-1)
    return torch.where(accepted_B, drafts_B, instead_B)


def uniform_of_gumbel(noise: Tensor) -> Tensor:
    """Return the uniform numbers that standard Gumbel noise was made of."""
    return torch.exp(-torch.exp(-noise.double()))
