"""Ends of texts: the layer's program of several passes against passes one by one."""

from __future__ import annotations

import pytest
import torch

from tests.models.oracle import random_ids
from tests.mtp.speculating import VOCAB_SIZE, make_models
from whalepod.models.cache import LatentCache
from whalepod.mtp.draft_batch import MAX_LAYOUTS, DraftBatches, DraftInput, Draw
from whalepod.mtp.module import MtpModule
from whalepod.server.engine.batching import BatchBuilder

GREEDY, RANDOM = Draw(temperature=0.0, seed=0), Draw(temperature=0.8, seed=5)


class Place:
    """Three texts of 70, 3 and 127 tokens, whose rows are stored but those of the last three."""

    def __init__(self, draw: Draw | None, num_wanted: int = 3) -> None:
        models = make_models()
        self.module: MtpModule = models.module
        config = models.model.config
        self.cache = LatentCache(
            num_layers=config.num_layers + 1,
            num_blocks=16,
            row_width=config.cache_row_width,
            dtype=torch.float32,
            device="cpu",
        )
        self.cache.rows_LPBC.fill_(torch.nan)
        self.batches = BatchBuilder(max_tokens=256, max_rows=4, max_model_len=256)
        torch.manual_seed(0)
        self.texts, self.states = [], []
        for number, (length, num_wrong) in enumerate([(70, 0), (3, 2), (127, 1)]):
            ids = random_ids(length, VOCAB_SIZE, seed=number)
            states_TH = torch.randn(length + 2, config.hidden_size)
            text = DraftInput(
                sequence_id=number,
                token_ids=tuple(ids[-2:]),
                start=length - 2,
                num_wrong=num_wrong,
                hidden_row=0,
                block_ids=tuple(range(4 * number, 4 * number + 3)),
                num_wanted=num_wanted,
                draw=draw,
            )
            self.texts.append(text)
            self.states.append(states_TH)
            if length > 3:
                self.write(text._replace(token_ids=tuple(ids[1:-2]), start=1), states_TH)

    def write(self, span: DraftInput, states_TH: torch.Tensor) -> None:
        """Store rows of a span, made of the states before its tokens."""
        batch = self.batches.build([span])
        end = span.start + len(span.token_ids)
        self.module.write_rows(
            batch.token_ids_T,
            states_TH[span.start - 1 : end - 1],
            batch.positions_T,
            batch.slots_T,
            self.cache,
        )

    @property
    def previous_TH(self) -> torch.Tensor:
        return torch.cat([
            states_TH[text.start - 1 : text.start + 1 + text.num_wrong]
            for text, states_TH in zip(self.texts, self.states, strict=True)
        ])  # fmt: skip

    def guess_slowly(self, number: int) -> list[int]:
        """Guess for one text with full passes over single spans."""
        text, states_TH = self.texts[number], self.states[number]
        known = text._replace(token_ids=text.token_ids[:1])
        self.write(known, states_TH)
        token_id, position = text.token_ids[1], text.start + 1
        hidden_TH, drafts = states_TH[position - 1 : position], []
        for depth in range(text.num_wanted):
            span = text._replace(token_ids=(token_id,), start=position + depth)
            hidden_TH = self.module.forward(hidden_TH, self.batches.build([span]), self.cache)
            out_B = torch.zeros(1, dtype=torch.int64)
            draw = text.draw or GREEDY
            self.module._kernels.draw(
                self.module.logits(hidden_TH),
                torch.tensor([draw.temperature]),
                torch.tensor([draw.seed]),
                torch.tensor([position + depth + 1]),
                out_B,
            )
            token_id = int(out_B)
            drafts.append(token_id)
        return drafts


@pytest.mark.parametrize("draw", [GREEDY, RANDOM])
def test_all_passes_in_one_guess_what_passes_one_by_one_do(draw: Draw) -> None:
    place = Place(draw)
    expected = [place.guess_slowly(number) for number in range(3)]

    for _ in range(3):  # computed, recorded, repeated
        fresh = Place(draw)
        draft_batch = DraftBatches().fill(fresh.texts)
        for _ in range(3):
            fresh.module.guess(fresh.previous_TH, draft_batch, fresh.cache)
            assert draft_batch.guesses_by_pass.T.tolist() == expected


def test_a_repeated_program_reads_the_texts_of_its_step() -> None:
    place = Place(RANDOM, num_wanted=2)
    draft_batches = DraftBatches()
    for number in range(4):
        texts = [text._replace(draw=Draw(0.8, 100 * number)) for text in place.texts]
        place.texts = texts
        draft_batch = draft_batches.fill(texts)
        place.module.guess(place.previous_TH, draft_batch, place.cache)
        found = draft_batch.guesses_by_pass.T.tolist()
        again = Place(None, num_wanted=2)
        again.texts = texts
        assert found == [again.guess_slowly(i) for i in range(3)], number


def test_shapes_share_memory_and_old_ones_go() -> None:
    draft_batches = DraftBatches()
    text = Place(GREEDY).texts[0]
    first = draft_batches.fill([text])
    assert draft_batches.fill([text._replace(token_ids=(1, 2))]) is first
    for num_wrong in range(1, MAX_LAYOUTS + 1):
        draft_batches.fill([text._replace(num_wrong=num_wrong, start=1)])
    assert draft_batches.fill([text]) is not first
