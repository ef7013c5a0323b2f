"""The Responses API on the wire: the response, its items, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from whalepod.scheduler.params import SamplingParams
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.chat_encoder import LogprobsWriter
from whalepod.server.gateway.content_blocks import (
    Block,
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockStarted,
)
from whalepod.server.gateway.encoder import PING, named_frame
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
from whalepod.server.gateway.response_store import Ids
from whalepod.server.gateway.responses_input import (
    ReasoningSettings,
    ResponsesRequest,
    TextFormat,
    TextSettings,
    functions_of,
)

WireEvent: TypeAlias = tuple[str, dict[str, object]]
"""The type of an event after `response.`, and its other fields."""

_DELTA_NAMES = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
}
_OF_REQUEST = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
_OF_SAMPLING = ("temperature", "top_p", "presence_penalty", "frequency_penalty")


def response_fields(
    request: ResponsesRequest, ids: Ids, model: str, params: SamplingParams
) -> dict[str, object]:
    """Return the fields of a response that do not change while it is made."""
    reasoning = request.reasoning or ReasoningSettings()
    return {
        "id": ids.response,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "store": request.store is not False,
        "text": _text(request.text or TextSettings()),
        "tool_choice": request.tool_choice or "auto",
        # tools of other types do not exist for the model either
        "tools": [{"type": "function", **f.model_dump()} for f in functions_of(request).values()],
        "top_logprobs": request.top_logprobs or 0,
        "truncation": "disabled",  # also when asked for: an input that is too long is refused
        **{name: getattr(request, name) for name in _OF_REQUEST},
        **{name: getattr(params, name) for name in _OF_SAMPLING},
    }


def _text(text: TextSettings) -> dict[str, object]:
    form = text.format or TextFormat(type="text")
    fields: dict[str, object] = {"type": form.type}
    if form.type == "json_schema":
        fields |= {"name": form.name or "answer", "description": form.description}
        fields |= {"schema": form.schema_, "strict": form.strict is not False}
    return {"format": fields, "verbosity": text.verbosity or "medium"}


def _usage(usage: UsageReady) -> dict[str, object]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class ResponsesEncoder:
    """Write the events of one response, or one `response` object.

    `fields` are what never changes of it; `keep` gets the finished object, before the client does.
    """

    ping = PING

    def __init__(
        self,
        fields: Mapping[str, object],
        ids: Ids,
        keep: Callable[[dict[str, object]], None],
        write_logprobs: LogprobsWriter | None = None,
    ) -> None:
        """`write_logprobs` turns log-probabilities into JSON; None when the request did not ask.

        The tokens of the text have one, not those of markup, reasoning and calls.
        """
        self._fields = fields
        self._ids = ids
        self._keep = keep
        self._write_logprobs = write_logprobs
        self._choice = Choice(0)
        self._num_sent_logprobs = 0
        self._sequence_number = -1

    # -- whole ---------------------------------------------------------------------------------

    def body(self, answer: FoldedAnswer) -> dict[str, object]:
        (self._choice,) = answer.choices
        return self._ended(answer.usage)

    def _ended(self, usage: UsageReady) -> dict[str, object]:
        """Return the finished response and have it kept."""
        reason = self._choice.finish_reason
        status = "incomplete" if reason == "length" else "completed"
        details = {"reason": "max_output_tokens"} if reason == "length" else None
        response = self._response(status, usage, incomplete_details=details)
        self._keep(response)
        return response

    def _response(
        self,
        status: str,
        usage: UsageReady | None = None,
        *,
        incomplete_details: dict[str, str] | None = None,
        error: dict[str, str] | None = None,
    ) -> dict[str, object]:
        return {
            **self._fields,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": incomplete_details,
            "output": [self._item(block) for block in self._choice.blocks],
            "usage": None if usage is None else _usage(usage),
        }

    def _item(self, block: Block, *, is_new: bool = False) -> dict[str, object]:
        """Return the item of a block as far as it has come; a new one has no content yet."""
        status = "completed" if block.is_complete else "incomplete"
        fields = {"id": self._ids.item(block), "status": "in_progress" if is_new else status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"type": "function_call", **fields, **call}
        content = [] if is_new else [self._part(block, self._written(block))]
        if block.kind == "reasoning":
            return {"type": "reasoning", **fields, "summary": [], "content": content}
        return {"type": "message", **fields, "role": "assistant", "content": content}

    def _part(self, block: Block, logprobs: list[Any]) -> dict[str, object]:
        """Return the content part of a reasoning or text block."""
        if block.kind == "reasoning":
            return {"type": "reasoning_text", "text": block.text}
        text = {"type": "output_text", "text": block.text}
        return {**text, "annotations": [], "logprobs": logprobs}

    def _written(self, block: Block, start: int = 0) -> list[Any]:
        """Return the log-probabilities from a position on, for a text if they were asked for."""
        write = self._write_logprobs if block.kind == "text" else None
        return write(self._choice.text_logprobs[start:]) if write else []

    # -- stream --------------------------------------------------------------------------------

    def frames(self, event: Event) -> bytes:
        return b"".join(self._frame(name, fields) for name, fields in self._events(event))

    def _frame(self, name: str, fields: dict[str, object]) -> bytes:
        self._sequence_number += 1
        kind = f"response.{name}"
        return named_frame(kind, {"type": kind, "sequence_number": self._sequence_number, **fields})

    def _events(self, event: Event) -> Iterator[WireEvent]:
        match event:
            case ChoiceStarted():
                yield from self._begin()
            case Delta() | Finished():
                self._choice.add_tokens(event)
                for block_event in event.blocks:
                    yield from self._block_events(block_event)
            case UsageReady():
                response = self._ended(event)
                yield str(response["status"]), {"response": response}
            case Failed():
                yield from self._fail(event.error)

    def _begin(self) -> Iterator[WireEvent]:
        response = self._response("in_progress")
        yield "created", {"response": response}
        yield "in_progress", {"response": response}

    def _fail(self, error: ApiError) -> Iterator[WireEvent]:
        if self._sequence_number < 0:
            yield from self._begin()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        details = {"code": code, "message": error.message}
        yield "failed", {"response": self._response("failed", error=details)}

    def _block_events(self, event: BlockEvent) -> Iterator[WireEvent]:
        block = self._choice.add_to_blocks(event)
        name, is_call = _DELTA_NAMES[block.kind], block.kind == "call"
        place: dict[str, object] = {"item_id": self._ids.item(block), "output_index": block.index}
        if not is_call:
            place["content_index"] = 0
        match event:
            case BlockStarted():
                item = self._item(block, is_new=True)
                yield "output_item.added", {"output_index": block.index, "item": item}
                if not is_call:
                    yield "content_part.added", {**place, "part": self._part(block, [])}
            case BlockGrew():
                fields = {**place, "delta": event.text}
                if block.kind == "text":
                    fields["logprobs"] = self._written(block, self._num_sent_logprobs)
                    self._num_sent_logprobs = len(self._choice.text_logprobs)
                yield f"{name}.delta", fields
            case BlockEnded():
                yield f"{name}.done", {**place, **self._whole(block)}
                if not is_call:
                    part = self._part(block, self._written(block))
                    yield "content_part.done", {**place, "part": part}
                yield "output_item.done", {"output_index": block.index, "item": self._item(block)}

    def _whole(self, block: Block) -> dict[str, object]:
        match block.kind:
            case "call":
                return {"name": block.name, "arguments": block.text}
            case "reasoning":
                return {"text": block.text}
            case "text":
                return {"text": block.text, "logprobs": self._written(block)}
