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
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.kernels.interface import Kernels
from whalepod.mtp.verify import choose_by_rejection, uniform_of_gumbel
from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.engine.sampling_state import SamplingState, seed_of_branch

Logits: TypeAlias = NDArray[np.float32]


class _Stream(Enum):
    """Random numbers of a sequence beside g(seed, position), for acceptance by rejection; the
    values lie above all answers' indices."""

    DRAFT = 1 << 20
    ACCEPT = 2 << 20
    INSTEAD = 3 << 20


@dataclass(slots=True)
class SampleRequest:
    """One token to choose: `position` is its index in the sequence's whole text.

    `before` are the tokens before it that the state has not observed. With acceptance by
    rejection `draft` is the guess that is judged here, drawn from `log_q_V` (None: it was certain).
    """

    state: SamplingState
    position: int
    before: Sequence[int] = ()
    draft: int | None = None
    log_q_V: Tensor | None = None


class SamplerOutput(NamedTuple):
    """The choices in the order of the rows; a logprob only where the request asks for it."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    is_fault: list[bool]
    """The row's logits hold a NaN or an infinity: the choice means nothing."""


class Sampler:
    """SamplerOutput rows of logits with the settings of their sequences. Holds no state of its own.

    by_rejection  drafts are drawn and judged by the classical rule instead of by coupling
    """

    def __init__(self, kernels: Kernels, *, by_rejection: bool = False) -> None:
        self._kernels = kernels
        self.by_rejection = by_rejection

    def sample(self, logits_BV: Tensor, wanted: Sequence[SampleRequest]) -> SamplerOutput:
        """Choose one token per row of f32 `[B, V]`, which is not changed."""
        x_BV = logits_BV.numpy()
        ids = _argmax(x_BV)
        is_fault = [not math.isfinite(x_BV.item(row, i)) for row, i in enumerate(ids)]
        shaped = [row for row, w in enumerate(wanted) if w.position < w.state.plain_from]
        if shaped:
            chosen, _ = self._choose(x_BV[shaped], [wanted[row] for row in shaped])
            for row, token_id in zip(shaped, chosen, strict=True):
                ids[row] = token_id
        return SamplerOutput(ids, _logprobs_of_rows(logits_BV, ids, wanted), is_fault)

    def draft(
        self, logits_BV: Tensor, wanted: Sequence[SampleRequest]
    ) -> tuple[list[int], list[Tensor | None]]:
        """Guess one token per row of a draft model's logits, as the model will choose.

        Returns the guesses and, with acceptance by rejection, the log-probabilities `[V]` (up to a
        constant) that the random ones were drawn from.
        """
        x_BV = logits_BV.numpy()
        ids = _argmax(x_BV)
        log_qs: list[Tensor | None] = [None] * len(ids)
        shaped = [row for row, w in enumerate(wanted) if w.position < w.state.plain_from]
        if shaped:
            chosen, log_q_BV = self._choose(
                x_BV[shaped], [wanted[row] for row in shaped], _Stream.DRAFT
            )
            for row, token_id, log_q_V in zip(shaped, chosen, log_q_BV, strict=True):
                ids[row] = token_id
                log_qs[row] = log_q_V
        return ids, log_qs

    def _choose(
        self, x_BV: Logits, wanted: list[SampleRequest], stream: _Stream | None = None
    ) -> tuple[list[int], Sequence[Tensor | None]]:
        """Choose for rows that are random or edited; the logits `x_BV` are theirs to change."""
        edited = [row for row, w in enumerate(wanted) if w.position < w.state.unedited_from]
        if edited:
            _edit(torch.from_numpy(x_BV), edited, [wanted[row] for row in edited])
        random = [row for row, want in enumerate(wanted) if not want.state.is_greedy]
        if len(random) == len(wanted):
            return self._draw(x_BV, wanted, stream)
        chosen = _argmax(x_BV)
        log_qs: list[Tensor | None] = [None] * len(wanted)
        if random:
            ids, drawn_from = self._draw(x_BV[random], [wanted[row] for row in random], stream)
            for row, token_id, log_q_V in zip(random, ids, drawn_from, strict=True):
                chosen[row], log_qs[row] = token_id, log_q_V
        return chosen, log_qs

    def _draw(
        self, x_BV: Logits, wanted: list[SampleRequest], stream: _Stream | None
    ) -> tuple[list[int], Sequence[Tensor | None]]:
        """Draw from each row: argmax(log p + g), or what the rule of rejection says of a draft.

        Returns the tokens and, with acceptance by rejection, log p; the logits are changed.
        """
        log_p_BV = restrict(x_BV, [want.state for want in wanted])
        noise_BV = self._noise(wanted, log_p_BV.shape[1], stream if self.by_rejection else None)
        noisy_BV = noise_BV.numpy()
        noisy_BV += log_p_BV
        ids = _argmax(noisy_BV)
        if not self.by_rejection:
            return ids, [None] * len(ids)
        log_ps = torch.from_numpy(log_p_BV)
        judged = [row for row, want in enumerate(wanted) if want.draft is not None]
        if judged:
            chosen = self._judge(log_ps[judged], [wanted[row] for row in judged])
            for row, token_id in zip(judged, chosen, strict=True):
                ids[row] = token_id
        return ids, list(log_ps)

    def _judge(self, log_p_BV: Tensor, wanted: list[SampleRequest]) -> list[int]:
        drafts_B = torch.tensor([want.draft for want in wanted])
        log_q_BV = torch.full_like(log_p_BV, -torch.inf)
        log_q_BV.scatter_(1, drafts_B[:, None], 0.0)
        for row, want in enumerate(wanted):
            if want.log_q_V is not None:
                log_q_BV[row] = want.log_q_V
        uniforms_B = uniform_of_gumbel(self._noise(wanted, 1, _Stream.ACCEPT))[:, 0]
        noise_BV = self._noise(wanted, log_p_BV.shape[1], _Stream.INSTEAD)
        ids: list[int] = choose_by_rejection(
            drafts_B, log_p_BV, log_q_BV, uniforms_B, noise_BV
        ).tolist()
        return ids

    def _noise(self, wanted: list[SampleRequest], width: int, stream: _Stream | None) -> Tensor:
        """Return g(seed, position) of each row; a stream is one of its own, independent of it."""
        seeds = [want.state.seed for want in wanted]
        if stream is not None:
            seeds = [seed_of_branch(seed, stream.value) for seed in seeds]
        positions = [want.position for want in wanted]
        seeds_B, positions_B = torch.from_numpy(np.array([seeds, positions], dtype=np.int64))
        return self._kernels.gumbel_noise(seeds_B, positions_B, width)


def _argmax(x_BV: Logits) -> list[int]:
    """Return the first largest entry of each row; a NaN counts as the largest.

    (numpy's is ten times as fast as torch's on a CPU.)
    """
    ids: list[int] = x_BV.argmax(axis=-1).tolist()
    return ids


# -- edits of the logits ------------------------------------------------------------------------


def _edit(logits_BV: Tensor, rows: Sequence[int], wanted: Sequence[SampleRequest]) -> None:
    """Apply grammars, min_tokens, logit_bias and penalties to some rows, in place, one `wanted`
    for each; all of them in one call each."""
    _keep_to_grammars(logits_BV, rows, wanted)
    stops = [(w.state.stop_token_ids, w.state.masks_stops(w.position)) for w in wanted]
    index, ids = _flat_index([ids if masked else ids[:0] for ids, masked in stops], rows)
    logits_BV[index, ids] = -torch.inf

    index, ids = _flat_index([w.state.bias_ids for w in wanted], rows)
    biases = np.concatenate([w.state.bias_values for w in wanted])
    logits_BV[index, ids] += torch.from_numpy(biases)

    if penalised := [i for i, w in enumerate(wanted) if w.state.has_penalties]:
        _penalise(logits_BV, [rows[i] for i in penalised], [wanted[i] for i in penalised])


def _keep_to_grammars(
    logits_BV: Tensor, rows: Sequence[int], wanted: Sequence[SampleRequest]
) -> None:
    for row, want in zip(rows, wanted, strict=True):
        if want.state.grammar is None:
            continue
        allowed_V = want.state.grammar.allowed(want.before)
        if allowed_V is not None:
            logits_BV[row, torch.from_numpy(~allowed_V)] = -torch.inf


def _penalise(logits_BV: Tensor, rows: list[int], wanted: list[SampleRequest]) -> None:
    states = [want.state for want in wanted]
    counts = [want.state.counts_after(want.before) for want in wanted]
    index, ids = _flat_index([ids for ids, _ in counts], rows)
    lengths = [len(ids) for ids, _ in counts]

    def per_token(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), lengths))

    repetition = per_token([s.params.repetition_penalty for s in states])
    frequency = per_token([s.params.frequency_penalty for s in states])
    presence = per_token([s.params.presence_penalty for s in states])
    generated = torch.from_numpy(np.concatenate([generated for _, generated in counts]))
    x = logits_BV[index, ids]
    x = torch.where(x > 0, x / repetition, x * repetition)
    logits_BV[index, ids] = x - frequency * generated - presence * (generated > 0)


def _flat_index(
    ids_of_rows: Sequence[NDArray[np.int64]], rows: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Return the (row, token) index of a ragged list of token ids, one array per row."""
    row_index = np.repeat(np.array(rows), [len(ids) for ids in ids_of_rows])
    return torch.from_numpy(row_index), torch.from_numpy(np.concatenate(ids_of_rows))


# -- the distribution ---------------------------------------------------------------------------


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


# -- log-probabilities --------------------------------------------------------------------------


def _logprobs_of_rows(
    logits_BV: Tensor, token_ids: list[int], wanted: Sequence[SampleRequest]
) -> list[TokenLogprob | None]:
    found: list[TokenLogprob | None] = [None] * len(wanted)
    if not any(want.state.wants_logprobs for want in wanted):
        return found
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
