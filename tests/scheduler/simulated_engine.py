"""An engine without tensors: a cache of plain tuples, and a model that is a hash of the text.

Every row's prefix is read back from the simulated cache, and the next token is computed from what
was read, so a wrong share, copy, eviction or roll-back shows at once.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

from whalepod.scheduler.config import SchedulerConfig
from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import Plan, Row, RowResult, SequenceOutput, StepResult, TokenLogprob
from whalepod.scheduler.request import Request, Sequence
from whalepod.scheduler.scheduler import Scheduler

EOS = 0
VOCAB_SIZE = 6
POISON = (-1, -1, "poison")


def next_token(text: tuple[int, ...], index: int) -> int:
    """Choose the next token of answer `index`; end of sequence about once in 24 tokens."""
    digest = zlib.crc32(bytes(text) + b"/" + bytes([index]))
    return EOS if digest % 24 == 0 else 1 + digest // 24 % (VOCAB_SIZE - 1)


def reference_answer(request: Request, index: int, max_total_tokens: int) -> tuple[list[int], str]:
    """Generate an answer from the prompt alone, and say why it ends."""
    text = list(request.prompt_token_ids)
    params = request.params
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    while len(text) < max_total_tokens:
        text.append(next_token(tuple(text), index))
        num_generated = len(text) - len(request.prompt_token_ids)
        if text[-1] in stops and num_generated > params.min_tokens:
            return text[len(request.prompt_token_ids) :], "stop"
    return text[len(request.prompt_token_ids) :], "length"


@dataclass
class Answer:
    """What a client has received of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_tokens: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    **settings: int | bool,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        **settings,  # type: ignore[arg-type]
    )
    return Scheduler(
        config, num_blocks=num_blocks, eos_token_ids=frozenset({EOS}), block_tokens=block_tokens
    )


def make_request(
    request_id: str,
    prompt: list[int] | tuple[int, ...],
    *,
    max_tokens: int | None = 8,
    n: int = 1,
    priority: int = 0,
    salt: str = "",
    **params: object,
) -> Request:
    return Request(
        request_id=request_id,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        num_sequences=n,
        priority=priority,
        cache_salt=salt,
    )


class SimulatedEngine:
    """Runs a scheduler's plans over the simulated cache and collects the answers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        size = scheduler.block_tokens
        self.cache = [[POISON] * size for _ in range(scheduler.pool.num_blocks)]
        self.answers: dict[tuple[str, int], Answer] = {}
        self.num_drafts = 0
        self.num_computed_tokens = 0
        self.plans: list[Plan] = []

    # ---- steps

    def step(self) -> Plan | None:
        """Plan a step and run it; its outcome is still open."""
        most_tokens = self.scheduler.count_tokens_at_most()
        plan = self.scheduler.step()
        num_tokens = 0 if plan is None else plan.num_tokens
        assert num_tokens <= most_tokens, f"{num_tokens} tokens, {most_tokens} were announced"
        if plan is not None:
            self.plans.append(plan)
            self.num_computed_tokens += plan.num_tokens
        return plan

    def run_step(self) -> Plan | None:
        plan = self.step()
        if plan is not None:
            self.finish(plan)
        return plan

    def run(self, *, max_steps: int = 10_000) -> int:
        """Run until nothing is left to do; returns the number of steps."""
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                return num_steps
            assert self.run_step() is not None, "requests are alive, but no step is planned"
        raise AssertionError(f"requests are still alive after {max_steps} steps")

    def finish(self, plan: Plan, *, failing: frozenset[int] = frozenset()) -> list[SequenceOutput]:
        """Compute a plan; the rows of the sequences in `failing` yield errors."""
        self._copy(plan)
        texts = [self._read(row) for row in plan.rows]
        self._write(plan, failing)
        rows = tuple(
            self._result(row, text, fails=row.sequence_id in failing)
            for row, text in zip(plan.rows, texts, strict=True)
        )
        outputs = self.scheduler.finish(StepResult(step=plan.step, rows=rows, step_time_us=7))
        self._collect(outputs)
        self._after_step()
        return outputs

    def fail(self, plan: Plan) -> None:
        """Let the whole step fail: copies and rows are garbage."""
        for copy in plan.copies:
            self.cache[copy.target] = [POISON] * self.scheduler.block_tokens
        self._write(plan, frozenset(row.sequence_id for row in plan.rows))
        self.scheduler.finish_failed(plan.step)
        self._after_step()

    # ---- the cache

    def _copy(self, plan: Plan) -> None:
        targets = [copy.target for copy in plan.copies]
        assert len(set(targets)) == len(targets), f"two copies into one block: {plan.copies}"
        for copy in plan.copies:
            assert copy.source not in targets, f"the order of copies matters: {plan.copies}"
            rows = self.cache[copy.source][: copy.num_tokens]
            assert POISON not in rows, f"{copy} reads rows that were never written"
            self.cache[copy.target][: copy.num_tokens] = rows

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.scheduler.block_tokens)
        return row.block_ids[index], offset

    def _read(self, row: Row) -> tuple[int, ...]:
        """Read a row's prefix and compare it with the sequence's own text."""
        sequence = self.scheduler.sequence(row.sequence_id)
        salt = sequence.request.cache_salt
        read = []
        for position in range(row.start):
            block_id, offset = self._slot(row, position)
            read.append(self.cache[block_id][offset])
        wanted = [(sequence.token_ids[i], i, salt) for i in range(row.start)]
        assert read == wanted, f"row {row} reads {read}, its text is {wanted}"
        num_own = len(row.token_ids) - row.num_drafts
        own = tuple(sequence.token_ids[row.start : row.start + num_own])
        assert own == tuple(row.token_ids[:num_own]), f"row {row} computes other tokens than {own}"
        return tuple(token_id for token_id, _, _ in read)

    def _write(self, plan: Plan, failing: frozenset[int]) -> None:
        written: set[tuple[int, int]] = set()
        for row in plan.rows:
            salt = self.scheduler.sequence(row.sequence_id).request.cache_salt
            for position, token_id in enumerate(row.token_ids, start=row.start):
                slot = self._slot(row, position)
                assert slot not in written, f"two rows write slot {slot}"
                written.add(slot)
                value = POISON if row.sequence_id in failing else (token_id, position, salt)
                self.cache[slot[0]][slot[1]] = value

    def _after_step(self) -> None:
        """Check all invariants, compare every cached text with its rows, poison free blocks."""
        self.scheduler.check()
        for node in self.scheduler.tree.nodes():
            depth, parent = 0, node.parent
            while parent is not None and parent.parent is not None:
                depth, parent = depth + 1, parent.parent
            start = depth * self.scheduler.block_tokens
            wanted = [(t, start + i, node.salt) for i, t in enumerate(node.token_ids)]
            found = self.cache[node.block_id][: len(wanted)]
            assert found == wanted, f"cached block {node.block_id} has {found}, not {wanted}"
        for block_id in self.scheduler.pool.free_blocks():
            self.cache[block_id] = [POISON] * self.scheduler.block_tokens

    # ---- the model

    def _result(self, row: Row, prefix: tuple[int, ...], *, fails: bool) -> RowResult:
        if fails:
            return RowResult(sequence_id=row.sequence_id, error="the row failed")
        sequence = self.scheduler.sequence(row.sequence_id)
        tokens = self._sample(row, prefix, sequence.index) if row.sample else ()
        text = prefix + tuple(row.token_ids[: len(row.token_ids) - row.num_drafts]) + tokens
        return RowResult(
            sequence_id=row.sequence_id,
            token_ids=tokens,
            logprobs=tuple(TokenLogprob(token_id=t, logprob=-0.5, rank=1) for t in tokens),
            prompt_logprobs=self._prompt_logprobs(row, sequence),
            draft_token_ids=self._drafts(text, sequence.index) if tokens else (),
        )

    def _sample(self, row: Row, prefix: tuple[int, ...], index: int) -> tuple[int, ...]:
        """Verify drafts: the model's token at each position, up to the first that differs."""
        num_own = len(row.token_ids) - row.num_drafts
        text = prefix + tuple(row.token_ids[:num_own])
        tokens: list[int] = []
        for draft in [*row.token_ids[num_own:], None]:
            token_id = next_token(text, index)
            tokens.append(token_id)
            text += (token_id,)
            if token_id != draft:
                break
        return tuple(tokens)

    def _drafts(self, text: tuple[int, ...], index: int) -> tuple[int, ...]:
        """Guess the next tokens: right ones, but every third text ends in a wrong one."""
        drafts: list[int] = []
        for _ in range(self.num_drafts):
            token_id = next_token(text, index)
            is_wrong = zlib.crc32(bytes(text)) % 3 == 0
            drafts.append((token_id + 1) % VOCAB_SIZE if is_wrong else token_id)
            text += (token_id,)
        return tuple(drafts)

    def _prompt_logprobs(self, row: Row, sequence: Sequence) -> tuple[TokenLogprob, ...]:
        prompt = sequence.request.prompt_token_ids
        if sequence.request.params.prompt_logprobs is None:
            return ()
        stop = min(row.start + len(row.token_ids), len(prompt) - 1)
        return tuple(
            TokenLogprob(token_id=prompt[position + 1], logprob=-1.0, rank=2)
            for position in range(row.start, stop)
        )

    # ---- the client

    def _collect(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            answer = self.answers.setdefault((output.request_id, output.index), Answer())
            assert answer.finish_reason is None, f"{output} after the end of its answer"
            assert output.token_ids or output.prompt_logprobs or output.finish_reason
            answer.token_ids += output.token_ids
            answer.logprobs += output.logprobs
            answer.prompt_logprobs += output.prompt_logprobs
            answer.finish_reason = output.finish_reason
            answer.num_cached_tokens = output.num_cached_tokens
