"""Chat completions on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.content_blocks import Block, BlockGrew, BlockStarted
from whalepod.server.gateway.encoder import (
    DONE,
    LOWEST_LOGPROB,
    PING,
    EncoderOptions,
    frame,
    usage_fields,
)
from whalepod.server.gateway.events import (
    Choice,
    ChoiceStarted,
    Delta,
    Event,
    Failed,
    Finished,
    FoldedAnswer,
    UsageReady,
)
from whalepod.server.tokenizer import TextTokenizer


class ChatEncoder:
    """Write `chat.completion.chunk` frames, or one `chat.completion` object."""

    ping = PING

    def __init__(
        self, header: Mapping[str, object], options: EncoderOptions, tokenizer: TextTokenizer
    ) -> None:
        """`header` is what each chunk repeats of the answer."""
        self._options = options
        self._write_logprobs = logprobs_writer(options.num_top_logprobs, tokenizer)
        self._object = {**header, "object": "chat.completion"}
        self._chunk = {**header, "object": "chat.completion.chunk"}
        self._prompt_fields = self._prompt_token_ids()

    def frames(self, event: Event) -> bytes:
        match event:
            case ChoiceStarted():
                return self._choice_frame(event.index, {"role": "assistant", "content": ""})
            case Delta():
                return self._text_frames(event)
            case Finished():
                return self._choice_frame(
                    event.index, {}, finish_reason=event.reason, stop_reason=event.stop_reason
                )
            case UsageReady():
                return self._usage_frame(event) + DONE
            case Failed():
                return frame(event.error.body())

    def body(self, answer: FoldedAnswer) -> dict[str, object]:
        return {
            **self._object,
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": usage_fields(answer.usage),
            **self._prompt_fields,
        }

    def _choice(self, choice: Choice) -> dict[str, object]:
        text, calls = choice.text, choice.calls
        message: dict[str, object] = {"role": "assistant", "content": text}
        message |= {"refusal": None, "annotations": [], **_reasoning(choice.reasoning)}
        if calls:
            message |= {"content": text or None, "tool_calls": [_tool_call(c) for c in calls]}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.text_logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._token_ids(choice.token_ids),
        }

    def _text_frames(self, event: Delta) -> bytes:
        """One frame for each block's part; the tokens of all go with the first.

        Log-probabilities go with the text that their tokens make.
        """
        deltas = list(_deltas(event))
        if not deltas and self._options.return_token_ids:
            deltas = [{"content": ""}]
        fields = self._token_ids(event.token_ids)
        logprobs = self._logprobs(event.text_logprobs) if event.text_logprobs else None
        frames = []
        for delta in deltas:
            if "content" in delta and logprobs is not None:
                fields, logprobs = {**fields, "logprobs": logprobs}, None
            frames.append(self._choice_frame(event.index, delta, **fields))
            fields = {}
        return b"".join(frames)

    def _choice_frame(self, index: int, delta: dict[str, object], **fields: object) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        prompt_fields, self._prompt_fields = self._prompt_fields, {}
        return frame({**self._chunk, "choices": [{**choice, **fields}], **prompt_fields})

    def _usage_frame(self, usage: UsageReady) -> bytes:
        if not self._options.include_usage:
            return b""
        return frame({**self._chunk, "choices": [], "usage": usage_fields(usage)})

    def _logprobs(self, logprobs: Sequence[TokenLogprob | None]) -> dict[str, object] | None:
        write = self._write_logprobs
        return None if write is None else {"content": write(logprobs), "refusal": None}

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, object]:
        return {"token_ids": list(token_ids)} if self._options.return_token_ids else {}

    def _prompt_token_ids(self) -> dict[str, object]:
        if not self._options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._options.prompts_token_ids[0])}


def _deltas(event: Delta) -> Iterator[dict[str, object]]:
    """Yield how the message grows; the first delta of a call names it."""
    for part in event.blocks:
        match part:
            case BlockGrew(kind="reasoning", text=text):
                yield _reasoning(text)
            case BlockGrew(kind="text", text=text):
                yield {"content": text}
            case BlockGrew(text=text, call_index=index):
                yield {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
            case BlockStarted(kind="call", call_index=index, call_id=call_id, name=name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": call_id, "type": "function", "function": function}
                yield {"tool_calls": [call]}


def _reasoning(text: str) -> dict[str, object]:
    """Return the reasoning under both names that clients look for; nothing when there is none."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _tool_call(call: Block) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.text}
    return {"id": call.call_id, "type": "function", "function": function}


LogprobsWriter: TypeAlias = Callable[[Sequence[TokenLogprob | None]], list[dict[str, object]]]


def logprobs_writer(num_top: int | None, tokenizer: TextTokenizer) -> LogprobsWriter | None:
    """Return what writes one entry per token, with exact bytes and `num_top` alternatives.

    None when nothing was asked for. The first token of an echoed prompt has no entry.
    """
    if num_top is None:
        return None

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": tokenizer.printable(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.bytes_of(token_id)),
        }

    def write(logprobs: Sequence[TokenLogprob | None]) -> list[dict[str, object]]:
        return [
            {
                **entry(token.token_id, token.logprob),
                "top_logprobs": [entry(*alternative) for alternative in token.top[:num_top]],
            }
            for token in logprobs
            if token is not None
        ]

    return write
