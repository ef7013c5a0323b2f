"""A scripted engine in memory: every gateway test's EngineClient."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.scripts import SCRIPT
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.plan import SequenceOutput, TokenLogprob
from whalepod.scheduler.stats import Stats
from whalepod.server.engine.scripted import ScriptFile
from whalepod.server.errors import EngineLost
from whalepod.server.messages import EngineInfo, Experts, Submit
from whalepod.server.tokenizer import TextTokenizer

MAX_MODEL_LEN = 512


@dataclass
class FakeEngine:
    """Answers with a text that depends on the prompt only, one token a step.

    The steps of a turn that a prompt names are emitted one by one, as the real engine does;
    `script` turns a request into steps of token ids.
    """

    tokenizer: TextTokenizer
    script: Callable[[Submit, int], Sequence[Sequence[int]]] | None = None
    says: Sequence[str] | None = None
    """The steps of all answers."""
    turns: ScriptFile = field(default_factory=lambda: ScriptFile(SCRIPT))
    rejection: RequestRejected | None = None
    failure: str | None = None
    gate: asyncio.Event | None = None
    """When set, nothing is emitted before the event."""
    stats: Stats = field(default_factory=lambda: Stats(num_blocks=100, num_free_blocks=100))
    other_ranks: dict[int, Stats] = field(default_factory=dict)
    submitted: list[Submit] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    aborted_answers: list[tuple[str, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_rejected_drafts: int | None = None
    """When set, all tokens of a step but the last were guessed, and this many more were wrong."""
    answers_pings: bool = True
    step_delay_s: float = 0.0

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            model_type="tiny",
            dtype="fp32",
            kernels="reference",
            max_model_len=MAX_MODEL_LEN,
            vocab_size=len(self.tokenizer.token_bytes),
            num_blocks=100,
            block_tokens=64,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            weights_bytes=0,
            kv_bytes_per_token=0,
            load_seconds=0.0,
            eos_token_ids=(self.tokenizer.transformers.eos_token_id,),
        )

    @property
    def rank_stats(self) -> dict[int, Stats]:
        return {0: self.stats} | self.other_ranks

    def abort_answer(self, request_id: str, index: int) -> None:
        self.aborted_answers.append((request_id, index))

    experts: Experts | None = None
    placed: tuple[tuple[int, ...], ...] | None = None

    def place_experts(self, slots: tuple[tuple[int, ...], ...]) -> None:
        self.placed = slots

    def reset_prefix_cache(self) -> None:
        self.stats = replace(self.stats, num_cached_blocks=0)

    async def ping(self, timeout_s: float) -> Stats:
        if not self.answers_pings:
            raise EngineLost(f"no answer within {timeout_s} s")
        return self.stats

    async def submit(self, request: Submit) -> AsyncGenerator[SequenceOutput]:
        self.submitted.append(request)
        if self.failure is not None:
            raise EngineLost(self.failure)
        if self.rejection is not None:
            raise self.rejection
        self.running.add(request.request_id)
        ended = False
        try:
            if self.gate is not None:
                await self.gate.wait()
            if request.params.prompt_logprobs is not None:
                yield self._prompt_output(request)
            sequences = [self._sequence(request, i) for i in range(request.num_sequences)]
            for step in range(max(map(len, sequences))):
                for index, outputs in enumerate(sequences):
                    is_aborted = (request.request_id, index) in self.aborted_answers
                    if step < len(outputs) and not is_aborted:
                        yield outputs[step]
                await asyncio.sleep(self.step_delay_s)
            ended = True
        finally:
            self.running.discard(request.request_id)
            if not ended:
                self.aborted.append(request.request_id)

    def _sequence(self, request: Submit, index: int) -> list[SequenceOutput]:
        """All outputs of one sequence, cut at max_tokens, ended by the end token."""
        outputs: list[SequenceOutput] = []
        left = request.params.max_tokens
        assert left is not None, "the gateway always says how many tokens fit"
        base = SequenceOutput(
            sequence_id=index,
            request_id=request.request_id,
            index=index,
            token_ids=(),
            num_cached_tokens=self.num_cached_tokens,
        )
        if left == 0:
            return [base._replace(finish_reason="length")]
        for step in self._steps(request, index):
            if step == ("!raise",):
                error = "the step failed"
                return [*outputs, base._replace(finish_reason="error", error=error)]
            ids = tuple(step)[:left]
            left -= len(ids)
            reason, stop_token = None, None
            ends = (self.eos, *request.params.stop_token_ids)
            if ids and ids[-1] in ends and not request.params.ignore_eos:
                reason, stop_token = "stop", ids[-1]
            elif left == 0:
                reason = "length"
            if self.num_rejected_drafts is not None:
                base = base._replace(
                    num_accepted_drafts=len(ids) - 1,
                    num_rejected_drafts=self.num_rejected_drafts,
                )
            outputs.append(
                base._replace(
                    token_ids=ids,
                    logprobs=self._logprobs(request, ids),
                    finish_reason=reason,
                    stop_token_id=stop_token,
                )
            )
            if reason is not None:
                return outputs
        raise AssertionError("a script ends with the end token or goes on for ever")

    @property
    def eos(self) -> int:
        return self.tokenizer.encode("<｜end▁of▁sentence｜>", adds_bos=False)[0]

    def _steps(self, request: Submit, index: int) -> Sequence[Sequence[int | str]]:
        prompt = b"".join(self.tokenizer.token_bytes[i] for i in request.prompt_token_ids)
        steps = self.says or self.turns.find(prompt.decode(errors="replace"))
        if steps is not None:
            return [*(self._piece(piece) for piece in steps), (self.eos,)]
        if self.script is not None:
            return self.script(request, index)
        text = f"answer {index} to {sum(request.prompt_token_ids)}, naïve 上海 🙂 done"
        ids = self.tokenizer.encode(text, adds_bos=False)
        if request.params.ignore_eos:
            return [(ids[i % len(ids)],) for i in range(MAX_MODEL_LEN)]
        return [*((token_id,) for token_id in ids), (self.eos,)]

    def _piece(self, piece: str) -> Sequence[int | str]:
        return ("!raise",) if piece == "!raise" else self.tokenizer.encode(piece, adds_bos=False)

    def _logprobs(self, request: Submit, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
        num_top = request.params.logprobs
        return () if num_top is None else tuple(fake_logprob(i, num_top) for i in ids)

    def _prompt_output(self, request: Submit) -> SequenceOutput:
        num_top = request.params.prompt_logprobs
        assert num_top is not None
        ids = request.prompt_token_ids[1:]
        return SequenceOutput(
            sequence_id=0,
            request_id=request.request_id,
            index=0,
            token_ids=(),
            prompt_logprobs=tuple(fake_logprob(i, num_top) for i in ids),
        )


def fake_logprob(token_id: int, num_top: int) -> TokenLogprob:
    """A log-probability that names its token; the runners-up are the next ids."""
    top = tuple((token_id + k, -0.25 * (token_id % 8) - k) for k in range(num_top))
    return TokenLogprob(token_id=token_id, logprob=-0.25 * (token_id % 8), rank=1, top=top)
