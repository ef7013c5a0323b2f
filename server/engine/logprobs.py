"""Log-probabilities of chosen tokens and of the likeliest ones, where a request asks for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.engine.sampling_state import SampleRequest


def logprobs_of_rows(
    logits_BV: Tensor, token_ids: list[int], wanted: Sequence[SampleRequest]
) -> list[TokenLogprob | None]:
    """Return one for each row whose request asks for it."""
    found: list[TokenLogprob | None] = [None] * len(wanted)
    by_width: dict[int, list[int]] = {}
    for row, want in enumerate(wanted):
        if want.state.params.logprobs is not None:
            by_width.setdefault(want.state.params.logprobs, []).append(row)
    for num_top, rows in by_width.items():
        chosen = [token_ids[row] for row in rows]
        for row, logprob in zip(rows, logprobs(logits_BV[rows], chosen, num_top), strict=True):
            found[row] = logprob
    return found


def logprobs(logits_BV: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-softmax of the model's own logits at the given tokens, one per row.

    (vLLM's default, "raw_logprobs": before penalties, temperature and cuts.)
    """
    logprobs_BV = logits_BV.log_softmax(dim=-1)
    chosen_B1 = logprobs_BV.gather(1, torch.tensor(token_ids)[:, None])
    ranks = ((logprobs_BV > chosen_B1).sum(dim=-1) + 1).tolist()
    values_BK, ids_BK = logprobs_BV.topk(min(num_top, logits_BV.shape[1]), dim=-1)
    return [
        TokenLogprob(
            token_id=token_id,
            logprob=value,
            rank=rank,
            top=tuple(sorted(zip(ids, values, strict=True), key=lambda pair: (-pair[1], pair[0]))),
        )
        for token_id, value, rank, ids, values in zip(
            token_ids, chosen_B1[:, 0].tolist(), ranks, ids_BK.tolist(), values_BK.tolist(),
            strict=True,
        )
    ]  # fmt: skip
