"""Drafts of several multi-token-prediction modules, and the hidden states that they need.

Module 0 continues the main model's hidden states, module m those of module m - 1 (DeepSeek-V3
report, section 2.2). Call h the main model's state of a token, s0, s1, ... those of the modules;
then **the row of module m in slot j is made of (state m at j - 1, t[j])**, state 0 being h and
state m + 1 being sm: it depends on tokens up to j only. State m begins m tokens behind the first
one that was computed.

So the states before a step's first token must still be there: of the last computed token for each
sequence, and of the last token of every full block, so that a prefix hit drafts exactly as a cold
run does. What a step computes is first stored with true states: by full passes of all modules but
the last, which the next one continues, and by the last one's KV-only pass. Then k full passes guess
from the end of each text, the last module feeding itself once all had their turn; the rows that
those leave behind are overwritten when their tokens are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch, TokenSpan
from whalepod.models.cache import LatentCache
from whalepod.mtp.interface import BatchSource, Choose, DraftModel, StepSpan
from whalepod.mtp.tail import KnownEnd


class KnownStates(NamedTuple):
    """The states of one sequence's token at `position`.

    states_MH [M, H]: one for each module to continue; state m is known from `origin + m` on.
    """

    position: int
    origin: int
    states_MH: Tensor


@dataclass(frozen=True, slots=True)
class StepStates:
    """The states of all tokens of a step: `[T, H]` for each module, zero where none is known."""

    states: tuple[Tensor, ...]
    origins: tuple[int, ...]

    def at(self, rows: Sequence[int], positions: Sequence[int]) -> list[KnownStates]:
        """Return the states in one row of each span, the tokens being at `positions`."""
        if len(self.states) == 1:
            states_BMH = self.states[0][rows][:, None]
        else:
            states_BMH = torch.stack([states_TH[rows] for states_TH in self.states], dim=1)
        return list(map(KnownStates, positions, self.origins, states_BMH.unbind()))


class _Start(NamedTuple):
    """The end of a text: its newest token, not computed yet, sits behind the `known` one."""

    sequence_id: int
    token_id: int
    block_ids: Sequence[int]
    known: KnownStates
    num_wanted: int


@dataclass(frozen=True, slots=True)
class _Span:
    """Some tokens of one sequence."""

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    block_ids: Sequence[int]


class _Before(NamedTuple):
    """What is known before a span: see KnownStates. No states: the span is where they begin."""

    origin: int
    states_MH: Tensor | None


class ChainDrafter:
    """`Drafter` of several modules."""

    def __init__(
        self,
        modules: Sequence[DraftModel],
        cache: LatentCache,
        batches: BatchSource,
        *,
        hidden_size: int,
    ) -> None:
        rows = cache.rows_LPBC
        self._modules = tuple(modules)
        self._cache = cache
        self._batches = batches
        self._block_states_PMH = torch.zeros(
            rows.shape[1], len(modules), hidden_size, dtype=rows.dtype, device=rows.device
        )
        self._tails: dict[int, KnownStates] = {}
        self._states: StepStates | None = None

    def forget(self, sequence_id: int) -> None:
        self._tails.pop(sequence_id, None)

    def note_preempted(self, sequence_id: int) -> None:
        """Nothing is kept that depends on cache rows."""

    def copy_block(self, source: int, target: int) -> None:
        self._block_states_PMH[target] = self._block_states_PMH[source]

    def keep(self, texts: Sequence[KnownEnd]) -> None:
        for text, known in zip(texts, self._known(texts), strict=True):
            self._tails[text.sequence_id] = known

    def _known(self, texts: Sequence[KnownEnd]) -> list[KnownStates]:
        """Return the states of each text's last true token."""
        if self._states is None:
            return []
        num_right = [len(text.token_ids) - (text.num_wanted > 0) for text in texts]
        return self._states.at(
            [text.hidden_row + num for text, num in zip(texts, num_right, strict=True)],
            [text.start - 1 + num for text, num in zip(texts, num_right, strict=True)],
        )

    def note_forward(
        self, spans: Sequence[StepSpan], batch: ForwardBatch, hidden_TH: Tensor
    ) -> None:
        """Store the modules' rows of all tokens of a step.

        Rows of drafts that turn out wrong are overwritten later, as the model's own rows are.
        """
        before = [self._before(span) for span in spans]
        states = [hidden_TH]
        for number in range(len(self._modules)):
            states += self._run(number, spans, before, batch, states[-1])
        known = StepStates(tuple(states), tuple([item.origin for item in before]))
        self._keep_ends_of_blocks(spans, known)
        self._states = known

    def _before(self, span: TokenSpan) -> _Before:
        """Return what is known before a span.

        Nothing is where a text begins, and inside a block whose first tokens were copied: the rows
        that would need it were copied, too (`num_lookback_tokens`).
        """
        start, num_modules = span.start, len(self._modules)
        tail = self._tails.get(span.sequence_id)
        if tail is not None and tail.position == start - 1:
            return _Before(tail.origin, tail.states_MH)
        if start == 0 or start % BLOCK_TOKENS:
            return _Before(start, None)
        block_id = span.block_ids[start // BLOCK_TOKENS - 1]
        return _Before(start - num_modules, self._block_states_PMH[block_id])

    def _run(
        self,
        number: int,
        spans: Sequence[TokenSpan],
        before: Sequence[_Before],
        batch: ForwardBatch,
        state_TH: Tensor,
    ) -> tuple[Tensor, ...]:
        """Store a module's rows where the state that it continues is known.

        Returns its own states `[T, H]`, unless it is the last.
        """
        is_last = number == len(self._modules) - 1
        previous_TH = torch.empty_like(state_TH)
        previous_TH[1:] = state_TH[:-1]
        kept: list[_Span | TokenSpan] = []
        dropped: list[int] = []
        begin = 0
        for span, (origin, states_MH) in zip(spans, before, strict=True):
            num_unknown = min(max(origin + number + 1 - span.start, 0), len(span.token_ids))
            if num_unknown:
                dropped += range(begin, begin + num_unknown)
                kept += _behind(span, num_unknown)
            else:
                assert states_MH is not None, "states begin behind the first token"
                previous_TH[begin] = states_MH[number]
                kept.append(span)
            begin += len(span.token_ids)
        if not dropped:
            return self._store(number, previous_TH, batch, is_last)
        known_T = torch.ones(begin, dtype=torch.bool, device=state_TH.device)
        known_T[dropped] = False
        found_TH = torch.zeros_like(state_TH)
        if kept:
            stored = self._store(number, previous_TH[known_T], self._batches.build(kept), is_last)
            for known_TH in stored:
                found_TH[known_T] = known_TH
        elif not is_last:
            self._modules[number].join()
        return () if is_last else (found_TH,)

    def _store(
        self, number: int, previous_TH: Tensor, batch: ForwardBatch, is_last: bool
    ) -> tuple[Tensor, ...]:
        module = self._modules[number]
        if not is_last:
            return (module.forward(previous_TH, batch, self._cache),)
        module.write_rows(
            batch.token_ids_T, previous_TH, batch.positions_T, batch.slots_T, self._cache
        )
        return ()

    def _keep_ends_of_blocks(self, spans: Sequence[TokenSpan], known: StepStates) -> None:
        begin = 0
        for span in spans:
            first = span.start // BLOCK_TOKENS * BLOCK_TOKENS + BLOCK_TOKENS - 1
            for position in range(first, span.start + len(span.token_ids), BLOCK_TOKENS):
                block_id = span.block_ids[position // BLOCK_TOKENS]
                for number, state_TH in enumerate(known.states):
                    row_H = state_TH[begin + position - span.start]
                    self._block_states_PMH[block_id, number] = row_H
            begin += len(span.token_ids)

    def join(self, num_passes: int) -> None:
        for module in self._modules[:-1]:
            module.join()
        self._join_passes(num_passes)

    def _join_passes(self, num_passes: int, first: int = 0) -> None:
        """Take part in the passes `first` .. `num_passes - 1` of other ranks."""
        for depth in range(first, num_passes):
            self._modules[min(depth, len(self._modules) - 1)].join()

    def draft(
        self, texts: Sequence[KnownEnd], choose: Choose, num_passes: int = 0
    ) -> list[list[int]]:
        known = self._known(texts)
        asking = [i for i, text in enumerate(texts) if text.num_wanted]
        starts = [_start(texts[i], known[i]) for i in asking]
        found: list[list[int]] = [[] for _ in texts]
        for i, drafts in zip(asking, self._guess(starts, asking, choose, num_passes), strict=True):
            found[i] = drafts
        return found

    def _guess(
        self, starts: Sequence[_Start], numbers: Sequence[int], choose: Choose, num_passes: int
    ) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in starts]
        found = [start.known.states_MH[:0] for start in starts]  # by the pass before
        num_own = max((start.num_wanted for start in starts), default=0)
        for depth in range(num_own):
            active = [i for i, start in enumerate(starts) if start.num_wanted > depth]
            number = min(depth, len(self._modules) - 1)
            spans = [self._next_span(starts[i], drafts[i], depth) for i in active]
            previous = [self._state_before(starts[i], found[i], depth) for i in active]
            batch = self._batches.build(spans)
            hidden_TH = self._modules[number].forward(
                torch.cat(previous) if len(previous) > 1 else previous[0], batch, self._cache
            )
            lengths = [len(span.token_ids) for span in spans]
            for i, states_TH in zip(active, torch.split(hidden_TH, lengths), strict=True):
                found[i] = states_TH
            last_BH = hidden_TH
            if len(hidden_TH) > len(active):
                last_BH = torch.stack([found[i][-1] for i in active])
            chosen = choose(
                self._modules[number].logits(last_BH),
                [numbers[i] for i in active],
                [drafts[i] for i in active],
            )
            for i, token_id in zip(active, chosen, strict=True):
                drafts[i].append(token_id)
        self._join_passes(num_passes, num_own)
        return drafts

    def _next_span(self, start: _Start, drafts: Sequence[int], depth: int) -> _Span:
        """Return the tokens that the pass of a depth computes: the last one, and in a module's
        first pass the ones before it that have no row of this module yet."""
        text = (start.token_id, *drafts)
        known = start.known
        num_before = depth
        if depth < len(self._modules):
            num_before = max(known.origin + depth - known.position, 0)
        return _Span(
            start.sequence_id,
            text[num_before:],
            known.position + 1 + num_before,
            start.block_ids,
        )

    def _state_before(self, start: _Start, found_TH: Tensor, depth: int) -> Tensor:
        """Return the states that a pass continues: those of the last one, behind the true one."""
        if not depth:
            return start.known.states_MH[:1]
        if depth >= len(self._modules):
            return found_TH[-1:] if len(found_TH) > 1 else found_TH
        if start.known.position >= start.known.origin + depth:
            return torch.cat([start.known.states_MH[depth : depth + 1], found_TH])
        return found_TH


def _start(text: KnownEnd, known: KnownStates) -> _Start:
    return _Start(text.sequence_id, text.token_ids[-1], text.block_ids, known, text.num_wanted)


def _behind(span: TokenSpan, num_tokens: int) -> list[_Span]:
    """Return what is behind the first tokens of a span, if anything."""
    token_ids = span.token_ids[num_tokens:]
    if not token_ids:
        return []
    return [_Span(span.sequence_id, token_ids, span.start + num_tokens, span.block_ids)]
