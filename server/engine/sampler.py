"""Chooses tokens: argmax(log p + g(seed, position)), where greedy is g = 0.

p is the model's distribution after, in this order: min_tokens, logit_bias, repetition, frequency
and presence penalties, temperature, min-p, top-k, top-p (the order of vLLM). The Gumbel noise g
makes the argmax a draw from p; it depends on the sequence's seed and on the token's position
alone, so neighbours, chunks and drafts change nothing. Where values tie the lowest id wins, and
top-k and top-p keep all tokens that tie with the last one kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.interface import Kernels
from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.engine.sampling_state import SamplingState

NUCLEUS_CANDIDATES = 256
"""Top-p sorts so many tokens first; rows whose nucleus is larger are sorted in full."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One token to choose: `position` is its index in the sequence's whole text."""

    state: SamplingState
    position: int

    @property
    def is_plain(self) -> bool:
        """The likeliest token of the untouched logits."""
        return self.state.is_greedy and not self.state.changes_logits(self.position)


@dataclass(frozen=True, slots=True)
class Samples:
    """The choices in the order of the rows; a logprob only where the request asks for it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    is_fault: list[bool]
    """The row's logits hold a NaN or an infinity: the choice means nothing."""


class Sampler:
    """Samples rows of logits with the settings of their sequences. Holds no state of its own."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits_BV: Tensor, wanted: Sequence[Wanted]) -> Samples:
        """Choose one token per row of f32 `[B, V]`, which is not changed."""
        peaks_B, ids_B = logits_BV.max(dim=-1)  # the first of equal ones, as argmax
        ids, peaks = ids_B.tolist(), peaks_B.tolist()
        shaped = [row for row, want in enumerate(wanted) if not want.is_plain]
        if shaped:
            chosen = self._choose(logits_BV[shaped], [wanted[row] for row in shaped])
            for row, token_id in zip(shaped, chosen, strict=True):
                ids[row] = token_id
        return Samples(
            token_ids=ids,
            logprobs=_logprobs_of_rows(logits_BV, ids, wanted),
            is_fault=[not math.isfinite(peak) for peak in peaks],
        )

    def _choose(self, logits_BV: Tensor, wanted: list[Wanted]) -> list[int]:
        """Choose for rows that are random or edited; `logits_BV` is theirs to change."""
        _edit(logits_BV, wanted)
        chosen_B = logits_BV.argmax(dim=-1)
        rows = [row for row, want in enumerate(wanted) if not want.state.is_greedy]
        if rows:
            states = [wanted[row].state for row in rows]
            positions = [wanted[row].position for row in rows]
            x_BV = restrict(logits_BV[rows], states)
            x_BV += self._kernels.gumbel_noise(
                torch.tensor([state.seed for state in states]),
                torch.tensor(positions),
                x_BV.shape[1],
            )
            chosen_B[rows] = x_BV.argmax(dim=-1)
        token_ids: list[int] = chosen_B.tolist()
        return token_ids


# -- edits of the logits ------------------------------------------------------------------------


def _edit(logits_BV: Tensor, wanted: Sequence[Wanted]) -> None:
    """Apply min_tokens, logit_bias and penalties in place; all rows in one call each."""
    stops = [(w.state.stop_token_ids, w.state.masks_stops(w.position)) for w in wanted]
    rows, ids = _flat_index([ids if masked else ids[:0] for ids, masked in stops])
    logits_BV[rows, ids] = -torch.inf

    rows, ids = _flat_index([w.state.bias_ids for w in wanted])
    biases = np.concatenate([w.state.bias_values for w in wanted])
    logits_BV[rows, ids] += torch.from_numpy(biases)

    if penalised := [row for row, w in enumerate(wanted) if w.state.has_penalties]:
        _penalise(logits_BV, penalised, [wanted[row].state for row in penalised])


def _penalise(logits_BV: Tensor, rows: list[int], states: list[SamplingState]) -> None:
    counts = [state.counts for state in states]
    index, ids = _flat_index([c.ids for c in counts], rows)
    lengths = [len(c.ids) for c in counts]

    def per_token(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths))

    repetition = per_token([s.params.repetition_penalty for s in states])
    frequency = per_token([s.params.frequency_penalty for s in states])
    presence = per_token([s.params.presence_penalty for s in states])
    generated = torch.from_numpy(np.concatenate([c.generated for c in counts]))
    x = logits_BV[index, ids]
    x = torch.where(x > 0, x / repetition, x * repetition)
    logits_BV[index, ids] = x - frequency * generated - presence * (generated > 0)


def _flat_index(
    ids_of_rows: Sequence[np.ndarray], rows: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the (row, token) index of a ragged list of token ids, one array per row."""
    numbers = np.arange(len(ids_of_rows)) if rows is None else np.array(rows)
    row_index = np.repeat(numbers, [len(ids) for ids in ids_of_rows])
    return torch.from_numpy(row_index), torch.from_numpy(np.concatenate(ids_of_rows))


# -- the distribution ---------------------------------------------------------------------------


def restrict(logits_BV: Tensor, states: Sequence[SamplingState]) -> Tensor:
    """Return log p up to a constant per row: temperature, then min-p, top-k, top-p.

    Tokens that are cut hold -inf. Works in place where it can.
    """
    vocab_size = logits_BV.shape[1]
    x_BV = logits_BV.div_(torch.tensor([[s.params.temperature] for s in states]))
    if any(s.params.min_p > 0 for s in states):
        _cut_below(x_BV, x_BV.amax(dim=-1) + _log([s.params.min_p for s in states]))
    if rows := [i for i, s in enumerate(states) if 0 < s.params.top_k < vocab_size]:
        x_BV[rows] = _top_k(x_BV[rows], [states[i].params.top_k for i in rows])
    if rows := [i for i, s in enumerate(states) if s.params.top_p < 1.0]:
        x_BV[rows] = _top_p(x_BV[rows], [states[i].params.top_p for i in rows])
    return x_BV


def _log(values: list[float]) -> Tensor:
    return torch.tensor(values).log()


def _cut_below(x_BV: Tensor, limit_B: Tensor) -> Tensor:
    return x_BV.masked_fill_(x_BV < limit_B[:, None], -torch.inf)


def _top_k(x_BV: Tensor, top_ks: list[int]) -> Tensor:
    largest = x_BV.topk(max(top_ks), dim=-1).values
    return _cut_below(x_BV, largest.gather(1, torch.tensor(top_ks)[:, None] - 1)[:, 0])


def _top_p(x_BV: Tensor, top_ps: list[float]) -> Tensor:
    """Keep the likeliest tokens until their probabilities reach top-p, at least one."""
    logprobs_BV = x_BV.log_softmax(dim=-1)
    top_p_B = torch.tensor(top_ps, dtype=torch.float64)
    vocab_size = x_BV.shape[1]
    num_candidates = min(NUCLEUS_CANDIDATES, vocab_size)
    limit_B, mass_B = _nucleus(logprobs_BV, top_p_B, num_candidates)
    large = (mass_B < top_p_B).nonzero()[:, 0]
    if num_candidates < vocab_size and large.numel():
        limit_B[large], _ = _nucleus(logprobs_BV[large], top_p_B[large], vocab_size)
    return x_BV.masked_fill_(logprobs_BV < limit_B[:, None], -torch.inf)


def _nucleus(logprobs_BV: Tensor, top_p_B: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Return the smallest log-probability kept and the mass of the candidates, per row.

    Sums run in f64 and in order of size, so they do not depend on the number of candidates.
    """
    values_BK = logprobs_BV.topk(num_candidates, dim=-1).values
    mass_BK = values_BK.double().exp().cumsum(dim=-1)
    last_B = (mass_BK < top_p_B[:, None]).sum(dim=-1).clamp_max(num_candidates - 1)
    return values_BK.gather(1, last_B[:, None])[:, 0], mass_BK[:, -1]


# -- log-probabilities --------------------------------------------------------------------------


def _logprobs_of_rows(
    logits_BV: Tensor, token_ids: list[int], wanted: Sequence[Wanted]
) -> list[TokenLogprob | None]:
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
