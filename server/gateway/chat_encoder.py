"""Chat completions on the wire."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.encoder import AnswerHeader, EncoderOptions, usage_fields
from whalepod.server.gateway.events import (
    Answer,
    Choice,
    Event,
    Failed,
    Finished,
    RoleStarted,
    TextDelta,
    ToolCall,
    UsageReady,
)
from whalepod.server.gateway.families.interface import (
    ToolArguments,
    ToolCallEnded,
    ToolCallStarted,
)
from whalepod.server.gateway.logprobs import chat_logprobs
from whalepod.server.gateway.sse import DONE, PING, frame
from whalepod.server.gateway.tokenizer import TextTokenizer


class ChatEncoder:
    """Write `chat.completion.chunk` frames, or one `chat.completion` object."""

    ping = PING

    def __init__(
        self, header: AnswerHeader, options: EncoderOptions, tokenizer: TextTokenizer
    ) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._chunk = header.fields("chat.completion.chunk")
        self._object = header.fields("chat.completion")
        self._prompt_fields = self._prompt_token_ids()

    def frames(self, event: Event) -> bytes:
        match event:
            case RoleStarted():
                delta: dict[str, object] = {"role": "assistant", "content": ""}
                return self._choice_frame(event.index, delta)
            case TextDelta():
                return self._text_frame(event)
            case Finished():
                return self._choice_frame(
                    event.index, {}, finish_reason=event.reason, stop_reason=event.stop_reason
                )
            case UsageReady():
                return self._usage_frame(event) + DONE
            case Failed():
                return frame(event.error.body())

    def body(self, answer: Answer) -> dict[str, object]:
        return {
            **self._object,
            "choices": [self._choice(choice) for choice in answer.choices],
            "usage": usage_fields(answer.usage),
            **self._prompt_fields,
        }

    def _choice(self, choice: Choice) -> dict[str, object]:
        text = choice.text if choice.text or not choice.tool_calls else None
        message: dict[str, object] = {"role": "assistant", "content": text}
        message |= {"refusal": None, "annotations": [], **_reasoning(choice.reasoning)}
        if choice.tool_calls:
            message["tool_calls"] = [_tool_call(call) for call in choice.tool_calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._token_ids(choice.token_ids),
        }

    def _text_frame(self, event: TextDelta) -> bytes:
        """One frame for each part; the tokens of all go with the first."""
        options = self._options
        deltas = list(_deltas(event))
        if not deltas and (options.return_token_ids or options.num_top_logprobs is not None):
            deltas = [{"content": ""}]
        fields = {"logprobs": self._logprobs(event.logprobs), **self._token_ids(event.token_ids)}
        frames = []
        for delta in deltas:
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
        num_top = self._options.num_top_logprobs
        return None if num_top is None else chat_logprobs(logprobs, num_top, self._tokenizer)

    def _token_ids(self, token_ids: Sequence[int]) -> dict[str, object]:
        return {"token_ids": list(token_ids)} if self._options.return_token_ids else {}

    def _prompt_token_ids(self) -> dict[str, object]:
        if not self._options.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._options.prompts_token_ids[0])}


def _deltas(event: TextDelta) -> Iterator[dict[str, object]]:
    if event.reasoning:
        yield _reasoning(event.reasoning)
    if event.text:
        yield {"content": event.text}
    for tool_event in event.tool_events:
        if not isinstance(tool_event, ToolCallEnded):
            yield {"tool_calls": [_tool_delta(tool_event)]}


def _reasoning(text: str) -> dict[str, object]:
    """Return the reasoning under both names that clients look for; nothing when there is none."""
    return {"reasoning_content": text, "reasoning": text} if text else {}


def _tool_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_delta(event: ToolCallStarted | ToolArguments) -> dict[str, object]:
    """Return the first delta of a call, which names it, or a piece of its arguments."""
    if isinstance(event, ToolArguments):
        return {"index": event.index, "function": {"arguments": event.text}}
    function = {"name": event.name, "arguments": ""}
    return {"index": event.index, "id": event.id, "type": "function", "function": function}
