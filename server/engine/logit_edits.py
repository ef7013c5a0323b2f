"""Edits of logits that some requests ask for: grammars, min_tokens, biases and penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from whalepod.server.engine.sampling_state import SampleRequest


def edit(logits_BV: Tensor, rows: Sequence[int], wanted: Sequence[SampleRequest]) -> None:
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
