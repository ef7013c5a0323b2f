"""Drafts of the multi-token-prediction layer, and the hidden states that it needs.

The row of slot j is made of (h[j-1], t[j]), so the hidden state before a step's first token must
still be there: of the last computed token for each sequence, and of the last token of every full
block, so that a prefix hit drafts exactly as a cold run does. What a step computes is first stored
by the KV-only pass with true hidden states; then k full passes guess from the end of each text, and
the rows that those leave behind are overwritten when their tokens are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch, TokenSpan
from whalepod.models.cache import LatentCache

NUM_LOOKBACK_TOKENS = 1
"""A sequence that starts inside a block computes so many copied tokens again, for their hidden
states."""


class DraftModel(Protocol):
    """What the drafter needs of a module; `MtpModule` has it."""

    def write_rows(
        self,
        token_ids_T: Tensor,
        previous_hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache: LatentCache,
    ) -> None: ...

    def forward(
        self, previous_hidden_TH: Tensor, batch: ForwardBatch, cache: LatentCache
    ) -> Tensor: ...

    def join(self) -> None: ...

    def logits(self, hidden_BH: Tensor) -> Tensor: ...


class BatchSource(Protocol):
    """Turns spans into tensors that live until the next call."""

    def build(self, rows: Sequence[TokenSpan]) -> ForwardBatch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStart:
    """The end of a text: its newest token, not computed yet, sits at `position`.

    `block_ids` covers `position + num_wanted` tokens; `hidden_H` is the main model's state of the
    token before.
    """

    sequence_id: int
    token_id: int
    position: int
    block_ids: Sequence[int]
    hidden_H: Tensor
    num_wanted: int


@dataclass(frozen=True, slots=True)
class _DraftToken:
    """One token as a span."""

    sequence_id: int
    token_ids: tuple[int]
    start: int
    block_ids: Sequence[int]


class _Tail(NamedTuple):
    """The hidden state of a sequence's last computed token, at `position`."""

    position: int
    hidden_H: Tensor


Choose = Callable[[Tensor, Sequence[int], Sequence[Sequence[int]]], list[int]]
"""(logits [B, V], numbers of the starts that they belong to, drafts of all starts so far) -> one
draft for each row."""


class Drafter:
    """Owns the hidden states; the module's cache rows are a layer of the cache."""

    def __init__(
        self, module: DraftModel, cache: LatentCache, batches: BatchSource, *, hidden_size: int
    ) -> None:
        rows = cache.rows_LPBC
        self._module = module
        self._cache = cache
        self._batches = batches
        self._block_hidden_PH = torch.zeros(
            rows.shape[1], hidden_size, dtype=rows.dtype, device=rows.device
        )
        self._tails: dict[int, _Tail] = {}

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        self._tails.pop(sequence_id, None)

    def copy_block(self, source: int, target: int) -> None:
        """Copy what belongs to a full block beside its rows."""
        self._block_hidden_PH[target] = self._block_hidden_PH[source]

    def keep(self, sequence_id: int, position: int, hidden_H: Tensor) -> None:
        """Keep the hidden state of a sequence's last true token. A repeated step keeps it again."""
        self._tails[sequence_id] = _Tail(position, hidden_H)

    def write_rows(
        self, spans: Sequence[TokenSpan], batch: ForwardBatch, hidden_TH: Tensor
    ) -> None:
        """Store the module's rows of all tokens of a step, `hidden_TH` being the model's states.

        Rows of drafts that turn out wrong are overwritten later, as the model's own rows are.
        """
        previous_TH = torch.empty_like(hidden_TH)
        previous_TH[1:] = hidden_TH[:-1]
        skipped, begin = [], 0
        for span in spans:
            before_H = self._hidden_before(span)
            if before_H is None:
                skipped.append(begin)
            else:
                previous_TH[begin] = before_H
            self._keep_ends_of_blocks(span, hidden_TH, begin)
            begin += len(span.token_ids)
        token_ids_T, positions_T, slots_T = batch.token_ids_T, batch.positions_T, batch.slots_T
        if skipped:
            kept_T = torch.ones(begin, dtype=torch.bool, device=hidden_TH.device)
            kept_T[skipped] = False
            token_ids_T, previous_TH = token_ids_T[kept_T], previous_TH[kept_T]
            positions_T, slots_T = positions_T[kept_T], slots_T[kept_T]
        self._module.write_rows(token_ids_T, previous_TH, positions_T, slots_T, self._cache)

    def _hidden_before(self, span: TokenSpan) -> Tensor | None:
        """Return the hidden state before a span's first token, or None where its row needs no
        writing: at position 0 it is masked, and inside a block it was copied with the token."""
        start = span.start
        tail = self._tails.get(span.sequence_id)
        if tail is not None and tail.position == start - 1:
            return tail.hidden_H
        if start == 0 or start % BLOCK_TOKENS:
            return None
        return self._block_hidden_PH[span.block_ids[start // BLOCK_TOKENS - 1]]

    def _keep_ends_of_blocks(self, span: TokenSpan, hidden_TH: Tensor, begin: int) -> None:
        first = span.start // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS - 1
        for position in range(first, span.start + len(span.token_ids), BLOCK_TOKENS):
            block_id = span.block_ids[position // BLOCK_TOKENS]
            self._block_hidden_PH[block_id] = hidden_TH[begin + position - span.start]

    def join(self, num_passes: int) -> None:
        """Take part in so many passes of other ranks, without tokens of this one."""
        for _ in range(num_passes):
            self._module.join()

    def draft(
        self, starts: Sequence[DraftStart], choose: Choose, num_passes: int = 0
    ) -> list[list[int]]:
        """Guess `num_wanted` tokens behind each text, one full pass for each of them.

        The module's own state takes the place of the main model's from the second pass on. Passes
        up to `num_passes`, which other ranks may run, are joined without tokens.
        """
        drafts: list[list[int]] = [[] for _ in starts]
        active = [i for i, start in enumerate(starts) if start.num_wanted]
        num_own = max((start.num_wanted for start in starts), default=0)
        if active:
            self._run_passes(starts, choose, active, drafts)
        self.join(num_passes - num_own)
        return drafts

    def _run_passes(
        self,
        starts: Sequence[DraftStart],
        choose: Choose,
        active: list[int],
        drafts: list[list[int]],
    ) -> None:
        hidden_BH = torch.stack([starts[i].hidden_H for i in active])
        while active:
            spans = [_next_token(starts[i], drafts[i]) for i in active]
            batch = self._batches.build(spans)
            hidden_BH = self._module.forward(hidden_BH, batch, self._cache)
            chosen = choose(self._module.logits(hidden_BH), active, drafts)
            for i, token_id in zip(active, chosen, strict=True):
                drafts[i].append(token_id)
            going_on = [i for i in active if len(drafts[i]) < starts[i].num_wanted]
            if len(going_on) < len(active):
                hidden_BH = hidden_BH[[active.index(i) for i in going_on]]
            active = going_on


def _next_token(start: DraftStart, drafts: Sequence[int]) -> _DraftToken:
    token_id = drafts[-1] if drafts else start.token_id
    return _DraftToken(
        start.sequence_id, (token_id,), start.position + len(drafts), start.block_ids
    )
