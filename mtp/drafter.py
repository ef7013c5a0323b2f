"""Drafts of the checkpoint's multi-token-prediction module.

The row in slot j of its cache layer is made of (h[j - 1], t[j]), h being the model's states: it
depends on tokens up to j only. So the state before a step's first token must still be there: it is
kept of the last computed token of each sequence, and of the last token of every full block, so that
a prefix hit drafts exactly as a cold run does.

A row is stored as soon as its state and its token are true: of known tokens after the forward
pass, of drafts when they are judged. Those that were right, and the new token after them, are
computed together: all get their rows, and the layer goes on with the newest, which guesses. Its
row is true, too, so nothing is left for the step that computes it. Then the layer feeds itself; the
rows that those passes leave behind are overwritten when their tokens are true.
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
from whalepod.mtp.draft_batch import DraftBatch, DraftBatches, DraftInput
from whalepod.mtp.module import MtpModule

MAX_KEPT_TOKENS = 64
"""States of a larger step are not kept alive for the sake of one of them."""

BuildBatch = Callable[[Sequence[TokenSpan]], ForwardBatch]
"""Turns spans into tensors that live until the next call."""
Choose = Callable[[Tensor, Sequence[int], Sequence[Sequence[int]]], list[int]]
"""(logits [B, V], numbers of the texts that they belong to, drafts of these so far) -> one draft
for each row."""


class StepSpan(TokenSpan, Protocol):
    """Tokens of one sequence in a step, of which the last `num_drafts` are guesses."""

    @property
    def num_drafts(self) -> int: ...


class _Known(NamedTuple):
    """The state of a sequence's last true token: `row` of `states_TH`.

    has_next: the row of the token after it is stored.
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
    """Rows of several tensors, put one after the other; neighbours are taken as one view."""

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


class Drafter:
    """Owns the states that are kept between steps; the module's rows are a layer of the cache.

    A step calls `note_forward`, `draft` and `keep`. What `keep` changes is all that outlives the
    step, so that one that failed before it can be run again.
    """

    def __init__(
        self, module: MtpModule, cache: LatentCache, build_batch: BuildBatch, *, hidden_size: int
    ) -> None:
        rows = cache.rows_LPBC
        self._module = module
        self._cache = cache
        self._build_batch = build_batch
        self._draft_batches = DraftBatches()
        self._block_states_PH = torch.zeros(
            rows.shape[1], hidden_size, dtype=rows.dtype, device=rows.device
        )
        self._known: dict[int, _Known] = {}
        self._hidden_TH = self._block_states_PH[:0]

    def forget(self, sequence_id: int) -> None:
        """Drop what is kept of a sequence that ended."""
        self._known.pop(sequence_id, None)

    def note_preempted(self, sequence_id: int) -> None:
        """Note that a sequence lost its cache rows."""
        known = self._known.get(sequence_id)
        if known is not None:
            self._known[sequence_id] = known._replace(has_next=False)

    def copy_block(self, source: int, target: int) -> None:
        """Copy what belongs to a full block beside its rows."""
        self._block_states_PH[target] = self._block_states_PH[source]

    def note_forward(
        self, spans: Sequence[StepSpan], batch: ForwardBatch, hidden_TH: Tensor
    ) -> None:
        """Store rows of a step's tokens, `hidden_TH` being the model's states.

        `batch` may be overwritten, as by `build_batch`.
        """
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
            self._write(pieces, batch if is_same else self._build_batch(unwritten))

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
        """Take part in `num_passes` passes of other ranks' `draft`, without tokens of this one."""
        for _ in range(num_passes):
            self._module.join()

    def draft(
        self, texts: Sequence[DraftInput], choose: Choose, num_passes: int = 0
    ) -> list[list[int]]:
        """Guess what follows each text of the step, one full pass for each token.

        Passes up to `num_passes`, which other ranks may run, are joined without tokens.
        """
        asking = [i for i, text in enumerate(texts) if text.num_wanted]
        if len(asking) < len(texts):
            self._write_right_drafts([text for text in texts if not text.num_wanted])
        drafts: list[list[int]] = [[] for _ in texts]
        num_own = 0
        if asking:
            asked = texts if len(asking) == len(texts) else [texts[i] for i in asking]
            num_own = max(text.num_wanted for text in asked)
            draft_batch = self._draft_batches.fill(asked)
            previous_TH = self._states_before(asked)
            if all(text.draw is not None and text.num_wanted == num_own for text in asked):
                self._module.guess(previous_TH, draft_batch, self._cache)
                for i, guesses in zip(asking, draft_batch.drafts[1:].T.tolist(), strict=True):
                    drafts[i] = guesses
            else:
                self._guess_one_by_one(texts, asking, previous_TH, draft_batch, choose, drafts)
        self.join(num_passes - num_own)
        return drafts

    def _write_right_drafts(self, texts: Sequence[DraftInput]) -> None:
        pieces, spans = _Pieces(), []
        for text in texts:
            if text.token_ids:
                row = text.hidden_row
                pieces.add(self._hidden_TH, row, row + len(text.token_ids))
                spans.append(text)
        if spans:
            self._write(pieces, self._build_batch(spans))

    def _states_before(self, texts: Sequence[DraftInput]) -> Tensor:
        """Return the states before all tokens of a batch; those of wrong drafts are there, too."""
        pieces = _Pieces()
        for text in texts:
            row = text.hidden_row
            pieces.add(self._hidden_TH, row, row + len(text.token_ids) + text.num_wrong)
        return pieces.join()

    def _guess_one_by_one(
        self,
        texts: Sequence[DraftInput],
        asking: Sequence[int],
        previous_TH: Tensor,
        draft_batch: DraftBatch,
        choose: Choose,
        drafts: list[list[int]],
    ) -> None:
        """Do as `MtpModule.guess`, with choices made outside, for texts that want guesses in
        different numbers."""
        hidden_BH = self._module.end(previous_TH, draft_batch, self._cache)
        active = list(asking)
        for depth in range(len(draft_batch.ends)):
            if depth:
                still = [i for i in active if texts[i].num_wanted > depth]
                if len(still) < len(active):
                    hidden_BH = hidden_BH[[active.index(i) for i in still]]
                active = still
                batch = self._build_batch([_guessed(texts[i], drafts[i]) for i in active])
                hidden_BH = self._module.forward(hidden_BH, batch, self._cache)
            so_far = [drafts[i] for i in active]
            chosen = choose(self._module.logits(hidden_BH), active, so_far)
            for i, token_id in zip(active, chosen, strict=True):
                drafts[i].append(token_id)

    def keep(self, texts: Sequence[DraftInput]) -> None:
        """Keep the states of each text's last true token. A repeated step keeps them again."""
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


def _guessed(text: DraftInput, drafts: Sequence[int]) -> _Span:
    """Return the newest guess."""
    position = text.start + len(text.token_ids) - 1 + len(drafts)
    return _Span(text.sequence_id, drafts[-1:], position, text.block_ids)
