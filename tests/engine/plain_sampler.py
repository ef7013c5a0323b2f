"""The sampler's plain twin: one row at a time, in numpy, in the order of its docstring."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tests.engine.noise import gumbel
from whalepod.scheduler.params import SamplingParams

f32 = np.float32


def edited(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    answer: list[int],
    stops: set[int],
) -> np.ndarray:
    x = logits.astype(f32).copy()
    if len(answer) < params.min_tokens:
        x[sorted(stops)] = -np.inf
    for token_id, bias in params.logit_bias.items():
        x[token_id] += f32(bias)
    for token_id in set(prompt) | set(answer):
        penalty = f32(params.repetition_penalty)
        x[token_id] = x[token_id] / penalty if x[token_id] > 0 else x[token_id] * penalty
    for token_id, count in Counter(answer).items():
        x[token_id] -= f32(params.frequency_penalty) * f32(count)
        x[token_id] -= f32(params.presence_penalty)
    return x


def restricted(x: np.ndarray, params: SamplingParams) -> np.ndarray:
    x = x / f32(params.temperature)
    if params.min_p > 0:
        x[x < x.max() + np.log(f32(params.min_p))] = -np.inf
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    if params.top_p < 1:
        order = np.argsort(-x, kind="stable")
        p = np.exp((x - x.max()).astype(np.float64))
        mass = np.cumsum(p[order] / p.sum())
        last = int((mass < params.top_p).sum())
        x[x < x[order[min(last, len(x) - 1)]]] = -np.inf
    return x


def choose(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: list[int],
    answer: list[int],
    stops: set[int],
    seed: int,
) -> int:
    x = edited(logits, params, prompt, answer, stops)
    if params.temperature >= 1e-5:
        x = restricted(x, params) + gumbel(seed, len(prompt) + len(answer), len(x))
    return int(np.argmax(x))
