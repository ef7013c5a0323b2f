"""A model small enough to reason about: its logits are a hash of the text read from the cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tests.engine import plain_sampler
from tests.engine.noise import gumbel
from whalepod.kernels.interface import BLOCK_TOKENS
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.mtp.depth import Depth
from whalepod.mtp.draft_batch import DraftBatch
from whalepod.mtp.drafter import Drafter
from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.journal import RecordedScheduler
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import SequenceOutput
from whalepod.scheduler.scheduler import Scheduler
from whalepod.server.engine.batching import BatchBuilder
from whalepod.server.engine.core import EngineCore
from whalepod.server.engine.grammar import GrammarStore
from whalepod.server.engine.runner import Runner
from whalepod.server.engine.sampler import Sampler
from whalepod.server.engine.sampling_state import seed_of_branch
from whalepod.server.engine.scripted import FindScript, Script, ScriptedEngine, ScriptedSampler
from whalepod.server.engine.speculation import Speculator
from whalepod.server.messages import EngineInfo, StepOutputs

VOCAB_SIZE = 50


class NoiseKernels:
    """The one kernel that the sampler uses, one row at a time."""

    name = "noise"

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        rows = zip(seeds_B.tolist(), positions_B.tolist(), strict=True)
        return torch.from_numpy(np.stack([gumbel(s, p, num_tokens) for s, p in rows]))


def text_hash(token_ids: list[int]) -> int:
    value = 17
    for token_id in token_ids:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value


def logits_of_hash(value: int, vocab_size: int = VOCAB_SIZE) -> np.ndarray:
    return np.random.default_rng(value).normal(size=vocab_size).astype(np.float32) * 3


def logits_after(token_ids: list[int]) -> np.ndarray:
    """Return what the fake model predicts after a text: the oracle of the tests."""
    return logits_of_hash(text_hash(token_ids))


class FakeModel:
    """Writes (token, position) rows, reads the whole text back through the block table.

    A wrong slot, table, length or copy gives it another text, or a NaN that it refuses.
    """

    num_cache_layers, cache_row_width = 2, 3  # the second layer is FakeMtp's

    def __init__(self) -> None:
        self.num_forwards = 0
        self.batch_shapes: list[tuple[int, int]] = []
        self.fails_at: set[int] = set()

    def forward(self, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        self.num_forwards += 1
        if self.num_forwards in self.fails_at:
            raise RuntimeError(f"forward {self.num_forwards} was told to fail")
        rows_SC = cache.layer(0).view(-1, self.cache_row_width)
        rows_SC[batch.slots_T, 0] = batch.token_ids_T.float()
        rows_SC[batch.slots_T, 1] = batch.positions_T.float()
        rows_SC[batch.slots_T, 2] = 0.0
        starts = batch.query_start_B1.tolist()
        self.batch_shapes.append((len(starts) - 1, starts[-1]))
        hidden = []
        for b, (begin, end) in enumerate(pairwise(starts)):
            text = self._read(batch, cache, b)
            num_before = len(text) - (end - begin)
            assert batch.positions_T[begin:end].tolist() == list(range(num_before, len(text)))
            hidden += [text_hash(text[: num_before + i + 1]) for i in range(end - begin)]
        assert batch.max_query_tokens == max(e - s for s, e in pairwise(starts))
        return torch.tensor(hidden, dtype=torch.float32)[:, None]

    def join(self) -> None:
        """Take part in nothing: it is alone."""

    def _read(self, batch: ForwardBatch, cache: LatentCache, b: int) -> list[int]:
        assert batch.block_tables_BM.is_contiguous()
        length = int(batch.context_lens_B[b])
        num_blocks = math.ceil(length / BLOCK_TOKENS)
        blocks = batch.block_tables_BM[b, :num_blocks].long()
        rows = cache.layer(0)[blocks].reshape(-1, self.cache_row_width)[:length]
        assert not rows.isnan().any(), f"row {b} reads cache rows that nobody wrote"
        assert rows[:, 1].tolist() == list(range(length)), f"row {b} reads rows of other positions"
        return [int(token_id) for token_id in rows[:, 0].tolist()]

    def logits(self, hidden_BH: Tensor) -> Tensor:
        rows = [logits_of_hash(int(value)) for value in hidden_BH[:, 0].tolist()]
        return torch.from_numpy(np.stack(rows))


class FakeMtp:
    """Carries the hash of the text on from token to token, so it guesses right; but every third
    text makes it guess another's continuation.

    Each row holds (token, position, hash of the text before): a row that was made of a wrong
    hidden state, or is missing, or is another text's, breaks the chain.
    """

    def __init__(self) -> None:
        self.num_passes = 0

    def write_rows(
        self,
        token_ids_T: Tensor,
        previous_hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache: LatentCache,
    ) -> None:
        assert (positions_T > 0).all(), "slot 0 has no hidden state before it"
        rows_SC = cache.layer(1).view(-1, FakeModel.cache_row_width)
        rows_SC[slots_T, 0] = token_ids_T.float()
        rows_SC[slots_T, 1] = positions_T.float()
        rows_SC[slots_T, 2] = previous_hidden_TH[:, 0]

    def forward(
        self, previous_hidden_TH: Tensor, batch: ForwardBatch, cache: LatentCache
    ) -> Tensor:
        self.num_passes += 1
        inputs = (batch.token_ids_T, previous_hidden_TH, batch.positions_T, batch.slots_T)
        self.write_rows(*inputs, cache)
        return torch.tensor(
            [self._follow(batch, cache, b) for b in range(len(batch.context_lens_B))],
            dtype=torch.float32,
        )[:, None]

    def end(
        self, previous_hidden_TH: Tensor, draft_batch: DraftBatch, cache: LatentCache
    ) -> Tensor:
        self.num_passes += 1
        inputs = (
            draft_batch.token_ids_T,
            previous_hidden_TH,
            draft_batch.positions_T,
            draft_batch.slots_T,
        )
        self.write_rows(*inputs, cache)
        batch, (num_texts,) = draft_batch.ends[0], draft_batch.last_B.shape
        assert torch.equal(draft_batch.token_ids_T[draft_batch.last_B], batch.token_ids_T)
        hashes = [self._follow(batch, cache, b) for b in range(num_texts)]
        return torch.tensor(hashes, dtype=torch.float32)[:, None]

    def guess(
        self, previous_hidden_TH: Tensor, draft_batch: DraftBatch, cache: LatentCache
    ) -> None:
        hidden_BH = self.end(previous_hidden_TH, draft_batch, cache)
        for depth, drafts_B in enumerate(draft_batch.guesses_by_pass):
            if depth:
                hidden_BH = self.forward(hidden_BH, draft_batch.ends[depth], cache)
            logits_BV, positions_B = (
                self.logits(hidden_BH),
                draft_batch.positions_by_pass[depth],
            )
            noise_BV = NoiseKernels().gumbel_noise(draft_batch.seeds_B, positions_B, VOCAB_SIZE)
            temperatures_B1 = draft_batch.temperatures_B[:, None]
            random_BV = logits_BV / temperatures_B1 + noise_BV
            drafts_B[:] = torch.where(temperatures_B1 > 0, random_BV, logits_BV).argmax(dim=-1)

    def join(self) -> None:
        """Take part in nothing: it is alone."""

    def _follow(self, batch: ForwardBatch, cache: LatentCache, b: int) -> int:
        """Check the chain of hashes up to a request's last token and return the next link."""
        length = int(batch.context_lens_B[b])
        blocks = batch.block_tables_BM[b, : math.ceil(length / BLOCK_TOKENS)].long()
        first_token = int(cache.layer(0)[blocks[0], 0, 0])
        rows = cache.layer(1)[blocks].reshape(-1, FakeModel.cache_row_width)[:length]
        value = text_hash([first_token])
        for position, (token_id, place, before) in enumerate(rows[1:].tolist(), start=1):
            assert (place, before) == (position, value), (
                f"slot {position} of {length} holds ({place}, {before}), expected hash {value}"
            )
            value = (value * 31 + int(token_id) + 1) % 1_000_003
        return value

    def logits(self, hidden_BH: Tensor) -> Tensor:
        values = [int(value) for value in hidden_BH[:, 0].tolist()]
        rows = [logits_of_hash(value + (value % 3 == 0)) for value in values]
        return torch.from_numpy(np.stack(rows))


def poisoned_cache(num_blocks: int) -> LatentCache:
    cache = LatentCache(
        num_layers=FakeModel.num_cache_layers,
        num_blocks=num_blocks,
        row_width=FakeModel.cache_row_width,
        dtype=torch.float32,
        device="cpu",
    )
    cache.rows_LPBC.fill_(torch.nan)
    return cache


EOS = 0


def make_core(
    *,
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 512,
    model: FakeModel | None = None,
    steps: Sequence[str] = (),
    grammars: GrammarStore | None = None,
    mtp: FakeMtp | None = None,
    has_mtp: bool = True,
    with_lookup: bool = False,
    depth: Depth | None = None,
    journal: BinaryIO | None = None,
    **scheduler_options: Any,
) -> EngineCore:
    """Build an engine around the fake model; unwritten cache rows are NaN.

    With `steps` it answers every prompt by this script. With `depth` it drafts with `mtp` (None: a
    draft model of its own) if it `has_mtp`.
    """
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **scheduler_options,
    )
    cache = poisoned_cache(num_blocks)
    find: FindScript = lambda prompt: Script(steps, encode_letters, EOS)  # noqa: E731
    new_sampler = partial(ScriptedSampler, find) if steps else Sampler
    sampler = new_sampler(NoiseKernels())  # type: ignore[arg-type]
    batches = BatchBuilder(
        max_tokens=max_num_batched_tokens, max_rows=max_num_seqs, max_model_len=max_model_len
    )
    speculator = None
    if depth is not None:
        drafter = None
        if has_mtp:
            drafter = Drafter(mtp or FakeMtp(), cache, batches.build, hidden_size=1)  # type: ignore[arg-type]
        speculator = Speculator(drafter, sampler, with_lookup=with_lookup)
    runner = Runner(model or FakeModel(), cache, sampler, batches, speculator)
    info = EngineInfo(
        model_type="fake", dtype="fp32", kernels="noise", max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS,
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
        weights_bytes=0, kv_bytes_per_token=8, load_seconds=0.0,
        eos_token_ids=(EOS,),
    )  # fmt: skip
    settings: dict[str, Any] = {
        "num_blocks": num_blocks,
        "eos_token_ids": frozenset({EOS}),
        "num_lookback_tokens": int(depth is not None and has_mtp),
    }
    new_core = partial(ScriptedEngine, find) if steps else EngineCore
    return new_core(
        Scheduler(config, **settings)
        if journal is None
        else RecordedScheduler(config, file=journal, **settings),
        runner,
        info,
        depth=depth,
        grammars=grammars,
    )


def encode_letters(text: str) -> list[int]:
    """Encode each letter of a..z as 1..26."""
    return [ord(letter) - ord("a") + 1 for letter in text]


def expected_answer(prompt: list[int], params: SamplingParams, index: int = 0) -> list[int]:
    """Generate with the plain sampler and no engine: the oracle of every engine test."""
    assert params.max_tokens is not None
    seed = seed_of_branch(params.seed or 0, index)
    stops = {EOS, *params.stop_token_ids}
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        logits = logits_after(prompt + answer)
        answer.append(plain_sampler.choose(logits, params, prompt, answer, stops, seed))
        if answer[-1] in ends and len(answer) > params.min_tokens:
            break
    return answer


def run_to_end(core: EngineCore, max_steps: int = 5_000) -> dict[tuple[str, int], SequenceOutput]:
    """Step until nothing is left; return each answer with its outputs joined."""
    answers: dict[tuple[str, int], SequenceOutput] = {}
    for _ in range(max_steps):
        if not core.has_work:
            core.check()
            return answers
        outputs = core.step()
        assert outputs is not None, "there is work, but nothing can run"
        collect(answers, outputs)
    raise AssertionError(f"not done after {max_steps} steps")


def collect(answers: dict[tuple[str, int], SequenceOutput], outputs: StepOutputs) -> None:
    for output in outputs.outputs:
        key = (output.request_id, output.index)
        answers[key] = answers[key].join(output) if key in answers else output
