"""Chat completions on the wire."""

from __future__ import annotations

from collections.abc import Sequence

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
    UsageReady,
)
from whalepod.server.gateway.logprobs import chat_logprobs
from whalepod.server.gateway.sse import DONE, frame
from whalepod.server.gateway.tokenizer import TextTokenizer


class ChatEncoder:
    """Write `chat.completion.chunk` frames, or one `chat.completion` object."""

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
        message: dict[str, object] = {"role": "assistant", "content": choice.text}
        message |= {"refusal": None, "annotations": []}
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._token_ids(choice.token_ids),
        }

    def _text_frame(self, event: TextDelta) -> bytes:
        options = self._options
        if not event.text and not options.return_token_ids and options.num_top_logprobs is None:
            return b""
        extra = self._token_ids(event.token_ids)
        logprobs = self._logprobs(event.logprobs)
        return self._choice_frame(event.index, {"content": event.text}, logprobs=logprobs, **extra)

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
