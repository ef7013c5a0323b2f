"""Drafts of the one multi-token-prediction module that most checkpoints have.

The row in slot j of its cache layer is made of (h[j - 1], t[j]), h being the model's states: it
depends on tokens up to j only. So the state before a step's first token must still be there: it is
kept of the last computed token of each sequence, and of the last token of every full block, so that
a prefix hit drafts exactly as a cold run does.

A row is stored as soon as its state and its token are true: of known tokens behind the forward
pass, of drafts when they are judged. Those that were right, and the new token behind them, are
computed together: all get their rows, and the layer goes on with the newest, which guesses. Its
row is true, too, so nothing is left for the step that computes it. Then the layer feeds itself; the
rows that those passes leave behind are overwritten when their tokens are true.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.mtp.interface import BatchSource, Choose, DraftModel, StepSpan
from whalepod.mtp.tail import KnownEnd, Tail, Tails

MAX_KEPT_TOKENS = 64
"""States of a larger step are not kept alive for the sake of one of them."""


class _Known(NamedTuple):
    """The state of a sequence's last true token: `row` of `states_TH`.

    has_next: the row of the token behind it is stored.
    """

    position: int
    states_TH: Tensor
    row: int
    has_next: bool


@dataclass(frozen=True, slots=True)
class _Span:
    """Some tokens of one sequence."""

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]


class _Pieces:
    """Rows of several tensors, put one behind the other; neighbours are taken as one view."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Tensor, int, int]] = []

    def add(self, states_TH: Tensor, begin: int, end: int) -> None:
        if self._pieces and self._pieces[-1][0] is states_TH and self._pieces[-1][2] == begin:
            begin = self._pieces.pop()[1]
        if end > begin:
            self._pieces.append((states_TH, begin, end))

    def join(self) -> Tensor:
        views = [states_TH[begin:end] for states_TH, begin, end in self._pieces]
        return views[0] if len(views) == 1 else torch.cat(views)


class SingleDrafter:
    """`Drafter` of one module."""

    def __init__(
        self, module: DraftModel, cache: LatentCache, batches: BatchSource, *, hidden_size: int
    ) -> None:
        rows = cache.rows_LPBC
        self._module = module
        self._cache = cache
        self._batches = batches
        self._tails = Tails()
        self._block_states_PH = torch.zeros(
            rows.shape[1], hidden_size, dtype=rows.dtype, device=rows.device
        )
        self._known: dict[int, _Known] = {}
        self._hidden_TH = self._block_states_PH[:0]

    def forget(self, sequence_id: int) -> None:
        self._known.pop(sequence_id, None)

    def note_preempted(self, sequence_id: int) -> None:
        known = self._known.get(sequence_id)
        if known is not None:
            self._known[sequence_id] = known._replace(has_next=False)

    def copy_block(self, source: int, target: int) -> None:
        self._block_states_PH[target] = self._block_states_PH[source]

    def note_forward(
        self, spans: Sequence[StepSpan], batch: ForwardBatch, hidden_TH: Tensor
    ) -> None:
        self._hidden_TH = hidden_TH
        pieces, unwritten, begin = _Pieces(), list[StepSpan | _Span](), 0
        for span in spans:
            num_own = len(span.token_ids) - span.num_drafts
            first = self._add_state_before(span, pieces)
            if num_own > first:
                pieces.add(hidden_TH, begin, begin + num_own - 1)
                is_whole = not first and not span.num_drafts
                unwritten.append(span if is_whole else _part(span, first, num_own))
            begin = self._keep_ends_of_blocks(span, begin, hidden_TH)
        if unwritten:
            is_same = len(unwritten) == len(spans) and not any(
                isinstance(span, _Span) for span in unwritten
            )
            self._write(pieces, batch if is_same else self._batches.build(unwritten))

    def _add_state_before(self, span: StepSpan, pieces: _Pieces) -> int:
        """Add the state before a span; 1 if its first token needs no row.

        It has one already, or cannot have one: where a text begins, and inside a block whose first
        tokens were copied, the rows that would need a state were copied too
        (`num_lookback_tokens`).
        """
        start = span.start
        known = self._known.get(span.sequence_id)
        if known is not None and known.position == start - 1:
            if known.has_next:
                return 1
            pieces.add(known.states_TH, known.row, known.row + 1)
            return 0
        if start == 0 or start % BLOCK_TOKENS:
            return 1
        block_id = span.block_ids[start // BLOCK_TOKENS - 1]
        pieces.add(self._block_states_PH, block_id, block_id + 1)
        return 0

    def _write(self, pieces: _Pieces, batch: ForwardBatch) -> None:
        self._module.write_rows(
            batch.token_ids_T, pieces.join(), batch.positions_T, batch.slots_T, self._cache
        )

    def _keep_ends_of_blocks(self, span: StepSpan, begin: int, hidden_TH: Tensor) -> int:
        """Keep the states of last tokens of blocks; return where the next span begins."""
        start, num_tokens = span.start, len(span.token_ids)
        first = BLOCK_TOKENS - 1 - start % BLOCK_TOKENS
        for index in range(first, num_tokens, BLOCK_TOKENS):
            block_id = span.block_ids[(start + index) // BLOCK_TOKENS]
            self._block_states_PH[block_id] = hidden_TH[begin + index]
        return begin + num_tokens

    def join(self, num_passes: int) -> None:
        for _ in range(num_passes):
            self._module.join()

    def draft(
        self, texts: Sequence[KnownEnd], choose: Choose, num_passes: int = 0
    ) -> list[list[int]]:
        asking = [i for i, text in enumerate(texts) if text.num_wanted]
        if len(asking) < len(texts):
            self._write_right_drafts([text for text in texts if not text.num_wanted])
        drafts: list[list[int]] = [[] for _ in texts]
        num_own = 0
        if asking:
            asked = texts if len(asking) == len(texts) else [texts[i] for i in asking]
            num_own = max(text.num_wanted for text in asked)
            tail = self._tails.fill(asked)
            previous_TH = self._states_before(asked)
            if all(text.draw is not None and text.num_wanted == num_own for text in asked):
                self._module.guess(previous_TH, tail, self._cache)
                for i, guesses in zip(asking, tail.drafts[1:].T.tolist(), strict=True):
                    drafts[i] = guesses
            else:
                self._guess_one_by_one(texts, asking, previous_TH, tail, choose, drafts)
        self.join(num_passes - num_own)
        return drafts

    def _write_right_drafts(self, texts: Sequence[KnownEnd]) -> None:
        pieces, spans = _Pieces(), []
        for text in texts:
            if text.token_ids:
                row = text.hidden_row
                pieces.add(self._hidden_TH, row, row + len(text.token_ids))
                spans.append(text)
        if spans:
            self._write(pieces, self._batches.build(spans))

    def _states_before(self, texts: Sequence[KnownEnd]) -> Tensor:
        """Return the states before all tokens of a tail; those of wrong drafts are there, too."""
        pieces = _Pieces()
        for text in texts:
            row = text.hidden_row
            pieces.add(self._hidden_TH, row, row + len(text.token_ids) + text.num_wrong)
        return pieces.join()

    def _guess_one_by_one(
        self,
        texts: Sequence[KnownEnd],
        asking: Sequence[int],
        previous_TH: Tensor,
        tail: Tail,
        choose: Choose,
        drafts: list[list[int]],
    ) -> None:
        """Do as `DraftModel.guess`, with choices made outside, for texts that want guesses in
        different numbers."""
        hidden_BH = self._module.end(previous_TH, tail, self._cache)
        active = list(asking)
        for depth in range(len(tail.ends)):
            if depth:
                still = [i for i in active if texts[i].num_wanted > depth]
                if len(still) < len(active):
                    hidden_BH = hidden_BH[[active.index(i) for i in still]]
                active = still
                batch = self._batches.build([_guessed(texts[i], drafts[i]) for i in active])
                hidden_BH = self._module.forward(hidden_BH, batch, self._cache)
            so_far = [drafts[i] for i in active]
            chosen = choose(self._module.logits(hidden_BH), active, so_far)
            for i, token_id in zip(active, chosen, strict=True):
                drafts[i].append(token_id)

    def keep(self, texts: Sequence[KnownEnd]) -> None:
        hidden_TH = self._hidden_TH
        is_small = len(hidden_TH) <= MAX_KEPT_TOKENS
        for text in texts:
            asks = text.num_wanted > 0
            num_right = len(text.token_ids) - asks
            states_TH, row = hidden_TH, text.hidden_row + num_right
            if not is_small:
                states_TH, row = hidden_TH[row : row + 1].clone(), 0
            position = text.start - 1 + num_right
            self._known[text.sequence_id] = _Known(position, states_TH, row, asks)


def _part(span: StepSpan, first: int, end: int) -> _Span:
    return _Span(span.sequence_id, span.token_ids[first:end], span.start + first, span.block_ids)


def _guessed(text: KnownEnd, drafts: Sequence[int]) -> _Span:
    """Return the newest guess."""
    position = text.start + len(text.token_ids) - 1 + len(drafts)
    return _Span(text.sequence_id, drafts[-1:], position, text.block_ids)
