"""From engine outputs to events: detokenise, match stop strings, parse, end each choice once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from whalepod.scheduler.plan import SequenceOutput, TokenLogprob
from whalepod.server.engine_client import EngineClient
from whalepod.server.gateway.api_errors import ApiError, as_api_error
from whalepod.server.gateway.chat_formats.interface import STRUCTURE, Parser, PlainParser
from whalepod.server.gateway.content_blocks import BlockEvent, joined
from whalepod.server.gateway.events import (
    ChoiceStarted,
    Delta,
    Event,
    Failed,
    Finished,
    UsageReady,
)
from whalepod.server.gateway.stops import StopMatcher
from whalepod.server.gateway.text_tokens import TextTokens
from whalepod.server.gateway.timers import RequestTimer
from whalepod.server.messages import Submit
from whalepod.server.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRun:
    """One prompt of a request: what goes to the engine, and how its tokens become text."""

    submit: Submit
    first_index: int = 0
    """Index of its first choice; its `num_sequences` choices follow each other."""
    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False
    new_parser: Callable[[], Parser] = PlainParser
    constraint_param: str = ""
    """The request's field that the constraint of `submit.params` comes from."""
    markup_ids: frozenset[int] = frozenset()
    """Tokens that the parser must see even when special tokens are skipped."""


class ChoiceDecoder:
    """Turns the outputs of one sequence into the events of one choice."""

    def __init__(self, run: PromptRun, index: int, tokenizer: TextTokenizer) -> None:
        self._run = run
        self._index = run.first_index + index
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(
            skip_special_tokens=run.skip_special_tokens, kept_ids=run.markup_ids
        )
        self._parser = run.new_parser()
        self._stops = StopMatcher(run.stops, run.include_stop) if run.stops else None
        asked = run.submit.params.logprobs is not None
        self._text_tokens = TextTokens() if asked else None
        self._num_chars = 0
        self._started = False
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_accepted_drafts = 0
        self.num_rejected_drafts = 0
        self.done = False

    def push(
        self, output: SequenceOutput, prompt_logprobs: Sequence[TokenLogprob]
    ) -> Iterator[Event]:
        """Yield the events of new tokens, as long as the choice is not done."""
        if not self._started:
            self._started = True
            yield ChoiceStarted(index=self._index, cached_tokens=output.num_cached_tokens)
            if self._run.echo:
                yield self._echo(prompt_logprobs)
        delta, stop = self._decode(output)
        if delta is not None:
            yield delta
        if stop is not None:
            yield self._finish("stop", stop)
        elif output.finish_reason is not None:
            yield self._finish(output.finish_reason, self._stop_token(output))

    def _finish(self, reason: str, stop_reason: str | int | None) -> Finished:
        self.done = True
        blocks = self._parser.blocks
        has_calls = blocks.num_calls and not blocks.is_in_call
        return Finished(
            index=self._index,
            reason="tool_calls" if reason == "stop" and has_calls else reason,
            stop_reason=stop_reason,
            blocks=blocks.finish(is_complete=reason != "length"),
        )

    def _stop_token(self, output: SequenceOutput) -> int | None:
        asked = self._run.submit.params.stop_token_ids
        return output.stop_token_id if output.stop_token_id in asked else None

    def _decode(self, output: SequenceOutput) -> tuple[Delta | None, str | None]:
        """Decode token by token up to a stop string; ids, logprobs and text end together."""
        offsets: list[int] = []
        blocks: list[BlockEvent] = []
        text_logprobs: list[TokenLogprob] = []
        stop = None
        for token_id in output.token_ids:
            self.num_tokens += 1
            offsets.append(self._num_chars)
            ends = token_id == output.stop_token_id and len(offsets) == len(output.token_ids)
            self.num_reasoning_tokens += self._parser.in_reasoning and not ends
            piece = "" if ends and not self._run.include_stop else self._detokenizer.push(token_id)
            text, stop = self._match(self._marked(piece, token_id))
            self._parser.feed(text)
            if self._text_tokens is not None:
                if piece or (not ends and token_id not in self._tokenizer.special_ids):
                    self._text_tokens.push(piece, output.logprobs[len(offsets) - 1])
                blocks += (new := self._parser.blocks.take())
                text_logprobs += self._text_tokens.take(new)
            if stop is not None:
                break
        self._count_drafts(output, len(offsets))
        if stop is None and output.finish_reason is not None:
            text, stop = self._match(self._detokenizer.flush())
            self._parser.feed(text + (self._stops.flush() if self._stops else ""))
        if stop is not None or output.finish_reason is not None:
            self._parser.finish(complete=self._is_complete(output, stop))
        blocks += (new := self._parser.blocks.take())
        if self._text_tokens is not None:
            text_logprobs += self._text_tokens.take(new)
        if not offsets and not blocks:
            return None, stop
        delta = Delta(
            index=self._index,
            blocks=joined(blocks),
            token_ids=output.token_ids[: len(offsets)],
            logprobs=output.logprobs[: len(offsets)],
            text_logprobs=tuple(text_logprobs),
            text_offsets=tuple(offsets),
        )
        return delta, stop

    def _marked(self, piece: str, token_id: int) -> str:
        """Tell the parser which markers are tokens; the text before one may end a character."""
        if not self._run.markup_ids:
            return piece
        piece = piece.replace(STRUCTURE, "\ufffd")
        if token_id not in self._run.markup_ids:
            return piece
        start = len(piece) - len(self._tokenizer.printable(token_id))
        return piece[:start] + STRUCTURE + piece[start:]

    def _is_complete(self, output: SequenceOutput, stop: str | None) -> bool:
        """Return whether the model itself ended the answer."""
        cut = stop is not None or self._stop_token(output) is not None
        return output.finish_reason == "stop" and not cut

    def _count_drafts(self, output: SequenceOutput, num_kept: int) -> None:
        """Count guesses as the text is cut: after a stop string none is accepted."""
        num_accepted = min(output.num_accepted_drafts, num_kept)
        num_drafts = output.num_accepted_drafts + output.num_rejected_drafts
        self.num_accepted_drafts += num_accepted
        self.num_rejected_drafts += num_drafts - num_accepted

    def _match(self, piece: str) -> tuple[str, str | None]:
        self._num_chars += len(piece)
        if self._stops is None or self.num_tokens <= self._run.submit.params.min_tokens:
            return piece, None
        return self._stops.push(piece)

    def _echo(self, prompt_logprobs: Sequence[TokenLogprob]) -> Delta:
        token_ids = self._run.submit.prompt_token_ids
        detokenizer = self._tokenizer.detokenizer(skip_special_tokens=self._run.skip_special_tokens)
        texts, offsets = [], []
        for token_id in token_ids:
            offsets.append(self._num_chars)
            texts.append(detokenizer.push(token_id))
            self._num_chars += len(texts[-1])
        texts.append(detokenizer.flush())
        self._num_chars += len(texts[-1])
        asked = self._run.submit.params.prompt_logprobs is not None
        self._parser.blocks.grow("text", "".join(texts))
        return Delta(
            index=self._index,
            blocks=self._parser.blocks.take(),
            token_ids=token_ids,
            logprobs=(None, *prompt_logprobs) if asked else (),
            text_offsets=tuple(offsets),
            is_prompt=True,
        )


async def generate(
    engine: EngineClient, runs: Sequence[PromptRun], tokenizer: TextTokenizer, timer: RequestTimer
) -> AsyncGenerator[Event, None]:
    """Yield the events of all prompts of a request; the last is UsageReady or Failed.

    Closing the generator aborts in the engine whatever still runs.
    """
    usage = UsageReady(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
    sources = [_generate_one(engine, run, tokenizer, timer) for run in runs]
    failure: str | None = "abort"
    try:
        async with aclosing(sources[0] if len(sources) == 1 else _merge(sources)) as events:
            async for event in events:
                match event:
                    case UsageReady():
                        usage += event
                    case Failed():
                        failure = "error"
                        yield event
                        return
                    case _:
                        yield event
        failure = None
        yield usage
    finally:
        timer.ended(failure)


async def _generate_one(
    engine: EngineClient, run: PromptRun, tokenizer: TextTokenizer, timer: RequestTimer
) -> AsyncGenerator[Event, None]:
    decoders = [ChoiceDecoder(run, i, tokenizer) for i in range(run.submit.num_sequences)]
    prompt_logprobs: list[TokenLogprob] = []  # all on the first sequence, before any token
    num_cached = 0
    prompt_timer = timer.prompt(len(run.submit.prompt_token_ids))
    try:
        async with aclosing(engine.submit(run.submit)) as outputs:
            async for output in outputs:
                _raise_for_failure(output)
                if output.index == 0:  # the others share the first one's prompt: no reuse
                    num_cached = max(num_cached, output.num_cached_tokens)
                prompt_logprobs += output.prompt_logprobs
                decoder = decoders[output.index]
                if not (output.token_ids or output.finish_reason):
                    continue  # a chunk of the prompt
                prompt_timer.output(output.index, len(output.token_ids), output.queue_us / 1e6)
                if output.token_ids:
                    timer.token()
                events = list(decoder.push(output, prompt_logprobs))
                if decoder.done and output.finish_reason is None:  # a stop string: free its slot
                    engine.abort_answer(run.submit.request_id, output.index)
                for event in events:
                    if isinstance(event, Finished):
                        # a stop string may come before the limit that the engine saw
                        reason = "length" if event.reason == "length" else "stop"
                        prompt_timer.finished(output.index, reason)
                    yield event
        if not all(decoder.done for decoder in decoders):
            raise ApiError("engine_error", "the engine ended the answer without a reason")
    except Exception as error:  # a stream has begun: whatever fails must reach the client
        yield Failed(error=as_api_error(error))
        return
    yield UsageReady(
        prompt_tokens=len(run.submit.prompt_token_ids),
        completion_tokens=sum(decoder.num_tokens for decoder in decoders),
        cached_tokens=num_cached,
        reasoning_tokens=sum(decoder.num_reasoning_tokens for decoder in decoders),
        accepted_prediction_tokens=sum(decoder.num_accepted_drafts for decoder in decoders),
        rejected_prediction_tokens=sum(decoder.num_rejected_drafts for decoder in decoders),
    )


def _raise_for_failure(output: SequenceOutput) -> None:
    if output.error is not None or output.finish_reason in ("error", "abort"):
        message = output.error or f"the engine ended the answer with {output.finish_reason!r}"
        raise ApiError("engine_error", message)


async def _merge(sources: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Yield events of several prompts as they come; each keeps its own order."""
    # one place per source: a slow client holds back the sources, not the memory
    queue: asyncio.Queue[Event | None] = asyncio.Queue(len(sources))

    async def pump(source: AsyncIterator[Event]) -> None:
        async for event in source:  # it never raises: failures are events
            await queue.put(event)
        await queue.put(None)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        num_live = len(tasks)
        while num_live:
            event = await queue.get()
            if event is None:
                num_live -= 1
            else:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()
