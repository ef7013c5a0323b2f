"""The ends of texts as tensors: what is known since the last step, and places for guesses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch

MAX_LAYOUTS = 64


class Draw(NamedTuple):
    """How the tokens of a text are chosen: the likeliest, or (temperature > 0) a draw with the
    noise of a seed."""

    temperature: float
    seed: int


GREEDY = Draw(temperature=0.0, seed=0)


class DraftInput(NamedTuple):
    """The end of a text, known since the step.

    token_ids    the drafts of the step that were right, then, if more are wanted, the token after
                 them, which is not computed yet
    start        position of the first of them
    num_wrong    drafts of the step that were not; blocks cover their positions too
    hidden_row   the step's row of hidden states of the token before the first
    num_wanted   guesses; `block_ids` covers their positions but the last
    draw         how they are to be chosen; None: by the logits, outside
    """

    sequence_id: int
    token_ids: Sequence[int]
    start: int
    num_wrong: int
    hidden_row: int
    block_ids: Sequence[int]
    num_wanted: int
    draw: Draw | None = None


class DraftBatch:
    """Texts whose ends are computed in one pass, and the passes that continue them.

    token_ids_T, positions_T, slots_T   the known tokens of all texts, and in each text as many
                                        more as drafts were wrong: so steps have few shapes
    last_B                              the row of each text's newest token among them
    ends                                for each pass, its B tokens: first the newest, then guesses
    guesses_by_pass                     [passes, B], the guesses; those of one pass are the next
                                        one's tokens
    positions_by_pass                   their positions
    """

    def __init__(self, num_tokens: int, num_texts: int, num_passes: int, width: int) -> None:
        self._tokens, self._positions, self._slots = np.zeros((3, num_tokens), dtype=np.int64)
        self._last = np.zeros(num_texts, dtype=np.int64)
        self.drafts = np.zeros((num_passes + 1, num_texts), dtype=np.int64)
        self._places, self._end_slots = np.zeros((2, num_passes + 1, num_texts), dtype=np.int64)
        self._lengths = np.zeros((num_passes, num_texts), dtype=np.int32)
        self._tables = np.zeros((num_texts, width), dtype=np.int32)
        self._written: list[Sequence[int] | None] = [None] * num_texts
        self._temperatures = np.zeros(num_texts, dtype=np.float32)
        self._seeds = np.zeros(num_texts, dtype=np.int64)
        self._make_views()

    def _make_views(self) -> None:
        view = torch.from_numpy
        self.token_ids_T, self.positions_T, self.slots_T = (
            view(self._tokens), view(self._positions), view(self._slots),
        )  # fmt: skip
        self.last_B = view(self._last)
        self.guesses_by_pass = view(self.drafts[1:])
        self.positions_by_pass = view(self._places[1:])
        self.temperatures_B, self.seeds_B = view(self._temperatures), view(self._seeds)
        starts_B1, tables_BM = torch.arange(len(self._last) + 1).int(), view(self._tables)
        self.ends = tuple(
            ForwardBatch(
                token_ids_T=view(self.drafts[depth]),
                positions_T=view(self._places[depth]),
                slots_T=view(self._end_slots[depth]),
                query_start_B1=starts_B1,
                context_lens_B=view(self._lengths[depth]),
                block_tables_BM=tables_BM,
                max_query_tokens=1,
            )
            for depth in range(len(self._lengths))
        )

    def fill(self, texts: Sequence[DraftInput]) -> None:
        """Write what a step brought. Texts that want fewer guesses than there are passes may get
        places that are not theirs in later passes."""
        begin = 0
        for b, text in enumerate(texts):
            self._write_table(b, text.block_ids)
            known, table = text.token_ids, text.block_ids
            num_known = len(known)
            for i in range(num_known + text.num_wrong):
                position = text.start + i
                self._tokens[begin] = known[min(i, num_known - 1)]
                self._positions[begin] = position
                self._slots[begin] = (
                    table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
                )
                begin += 1
            self._last[b] = begin - 1 - text.num_wrong
            self._fill_ends(b, text, text.start + num_known - 1)

    def _fill_ends(self, b: int, text: DraftInput, newest: int) -> None:
        table = text.block_ids
        self.drafts[0, b] = text.token_ids[-1]
        for depth in range(text.num_wanted):
            position = newest + depth
            self._places[depth, b] = position
            self._end_slots[depth, b] = (
                table[position // BLOCK_TOKENS] * BLOCK_TOKENS + position % BLOCK_TOKENS
            )
            self._lengths[depth, b] = position + 1
        self._places[text.num_wanted, b] = newest + text.num_wanted
        if text.draw is not None:
            self._temperatures[b], self._seeds[b] = text.draw.temperature, text.draw.seed

    def _write_table(self, b: int, block_ids: Sequence[int]) -> None:
        """Write a block table, unless it is written: a tuple that is the same is equal."""
        if self._written[b] is not block_ids or not isinstance(block_ids, tuple):
            self._tables[b, : len(block_ids)] = block_ids
            self._written[b] = block_ids


class DraftBatches:
    """DraftBatches by their shape, so that steps of the same shape find the same memory."""

    def __init__(self) -> None:
        self._draft_batches: OrderedDict[tuple[int, int, int, int], DraftBatch] = OrderedDict()

    def fill(self, texts: Sequence[DraftInput]) -> DraftBatch:
        """Return the draft_batch of texts; the next one of the same shape overwrites it."""
        num_tokens = num_passes = width = 0
        for text in texts:
            num_tokens += len(text.token_ids) + text.num_wrong
            num_passes = max(num_passes, text.num_wanted)
            width = max(width, len(text.block_ids))
        width = 1 << (width - 1).bit_length()  # so that growing texts change shape rarely
        shape = (num_tokens, len(texts), num_passes, width)
        draft_batch = self._draft_batches.get(shape)
        if draft_batch is None:
            draft_batch = self._draft_batches[shape] = DraftBatch(*shape)
            if len(self._draft_batches) > MAX_LAYOUTS:
                self._draft_batches.popitem(last=False)
        else:
            self._draft_batches.move_to_end(shape)
        draft_batch.fill(texts)
        return draft_batch
