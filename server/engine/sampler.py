"""Chooses tokens: argmax(log p + g(seed, position)), where greedy is g = 0.

p is the model's distribution after, in this order: grammar, min_tokens, logit_bias, repetition,
frequency and presence penalties, temperature, min-p, top-k, top-p (the order of vLLM). The Gumbel
noise g makes the argmax a draw from p; it depends on the sequence's seed and on the token's
position alone, so neighbours, chunks and drafts change nothing. Where values tie the lowest id
wins, and top-k and top-p keep all tokens that tie with the last one kept.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.interface import Kernels
from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.engine.logit_edits import edit
from whalepod.server.engine.logprobs import logprobs_of_rows
from whalepod.server.engine.sampling_state import SampleRequest, SamplingState

Logits: TypeAlias = NDArray[np.float32]


class SamplerOutput(NamedTuple):
    """The choices in the order of the rows; a logprob only where the request asks for it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    is_fault: list[bool]
    """The row's logits hold a NaN or an infinity: the choice means nothing."""


class Sampler:
    """Samples rows of logits with the settings of their sequences. Holds no state of its own."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, logits_BV: Tensor, wanted: Sequence[SampleRequest]) -> SamplerOutput:
        """Choose one token per row of f32 `[B, V]`, which is not changed."""
        x_BV = logits_BV.numpy()
        ids = _argmax(x_BV)
        is_fault = [not math.isfinite(x_BV.item(row, i)) for row, i in enumerate(ids)]
        self._choose_shaped(ids, x_BV, wanted)
        logprobs: list[TokenLogprob | None] = [None] * len(wanted)
        if any(want.state.wants_logprobs for want in wanted):
            logprobs = logprobs_of_rows(logits_BV, ids, wanted)
        return SamplerOutput(ids, logprobs, is_fault)

    def draft(self, logits_BV: Tensor, wanted: Sequence[SampleRequest]) -> list[int]:
        """Guess one token per row of a draft model's logits, as the model will choose."""
        x_BV = logits_BV.numpy()
        ids = _argmax(x_BV)
        self._choose_shaped(ids, x_BV, wanted)
        return ids

    def _choose_shaped(self, ids: list[int], x_BV: Logits, wanted: Sequence[SampleRequest]) -> None:
        """Put other choices where the likeliest token is not simply taken."""
        shaped = [
            row
            for row, want in enumerate(wanted)
            if want.position < want.state.plain_from and math.isfinite(x_BV.item(row, ids[row]))
        ]
        if shaped:
            chosen = self._choose(x_BV[shaped], [wanted[row] for row in shaped])
            for row, token_id in zip(shaped, chosen, strict=True):
                ids[row] = token_id

    def _choose(self, x_BV: Logits, wanted: list[SampleRequest]) -> list[int]:
        """Choose for rows that are random or edited; the logits `x_BV` are theirs to change."""
        edited = [row for row, w in enumerate(wanted) if w.position < w.state.unedited_from]
        if edited:
            edit(torch.from_numpy(x_BV), edited, [wanted[row] for row in edited])
        random = [row for row, want in enumerate(wanted) if not want.state.is_greedy]
        if len(random) == len(wanted):
            return self._draw(x_BV, wanted)
        chosen = _argmax(x_BV)
        if random:
            ids = self._draw(x_BV[random], [wanted[row] for row in random])
            for row, token_id in zip(random, ids, strict=True):
                chosen[row] = token_id
        return chosen

    def _draw(self, x_BV: Logits, wanted: list[SampleRequest]) -> list[int]:
        """Draw from each row: argmax(log p + g). The logits are changed."""
        log_p_BV = restrict(x_BV, [want.state for want in wanted])
        seeds_and_positions = [[w.state.seed for w in wanted], [w.position for w in wanted]]
        seeds_B, positions_B = torch.from_numpy(np.array(seeds_and_positions, dtype=np.int64))
        noisy_BV = self._kernels.gumbel_noise(seeds_B, positions_B, log_p_BV.shape[1]).numpy()
        noisy_BV += log_p_BV
        return _argmax(noisy_BV)


def _argmax(x_BV: Logits) -> list[int]:
    """Return the first largest entry of each row; a NaN counts as the largest.

    (numpy's is ten times as fast as torch's on a CPU.)
    """
    ids: list[int] = x_BV.argmax(axis=-1).tolist()
    return ids


def restrict(x_BV: Logits, states: Sequence[SamplingState]) -> Logits:
    """Turn logits into log p up to a constant per row: temperature, then min-p, top-k, top-p.

    Tokens that are cut hold -inf. Works in place, and returns what it was given.
    """
    vocab_size = x_BV.shape[1]
    if any(s.params.temperature != 1.0 for s in states):
        x_BV /= np.array([[s.params.temperature] for s in states], dtype=np.float32)
    if any(s.params.min_p > 0 for s in states):
        log_min_p_B = torch.tensor([s.params.min_p for s in states]).log().numpy()
        _cut_below(x_BV, x_BV.max(axis=-1) + log_min_p_B)
    for row, state in enumerate(states):
        if 0 < state.params.top_k < vocab_size:
            smallest = vocab_size - state.params.top_k
            _cut_below(x_BV[row], np.partition(x_BV[row], smallest)[smallest])
    if rows := [i for i, s in enumerate(states) if s.params.top_p < 1.0]:
        logprobs_BV = torch.from_numpy(x_BV[rows]).log_softmax(dim=-1).numpy()
        for row, logprobs_V in zip(rows, logprobs_BV, strict=True):
            limit = _smallest_of_nucleus(logprobs_V, states[row].params.top_p)
            x_BV[row, logprobs_V < limit] = -np.inf
    return x_BV


def _cut_below(x: Logits, limit: Logits) -> None:
    x[x < limit[..., None]] = -np.inf


def _smallest_of_nucleus(logprobs_V: NDArray[np.float32], top_p: float) -> float:
    """Return the smallest of the likeliest tokens whose probabilities reach top-p, at least one.

    Only candidates are sorted: all tokens below (1 - top-p) / 2V together lack half of what is
    left out, so none of them is in the nucleus.
    """
    floor = math.log((1.0 - top_p) / 2 / len(logprobs_V))
    candidates = np.sort(logprobs_V[logprobs_V >= floor])[::-1]
    mass = np.cumsum(np.exp(candidates.astype(np.float64)))
    last = int(np.searchsorted(mass, top_p))
    return float(candidates[min(last, len(candidates) - 1)])
