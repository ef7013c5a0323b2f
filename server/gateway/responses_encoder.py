"""The Responses API on the wire: the response, its items, and the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from whalepod.scheduler.params import SamplingParams
from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.blocks import (
    Block,
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockStarted,
)
from whalepod.server.gateway.chat_encoder import LogprobsWriter
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
from whalepod.server.gateway.responses_input import ResponsesRequest, TextFormat, functions_of


def response_fields(
    request: ResponsesRequest, ids: Ids, model: str, params: SamplingParams
) -> dict[str, object]:
    """Return the fields of a response that do not change while it is made."""
    return {
        "id": ids.response,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata or {},
        "model": model,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": _reasoning(request),
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": request.store is not False,
        "temperature": params.temperature,
        "text": _text(request),
        "tool_choice": request.tool_choice or "auto",
        "tools": _tools(request),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": params.top_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "truncation": "disabled",  # also when asked for: an input that is too long is refused
        "user": request.user,
    }


def _reasoning(request: ResponsesRequest) -> dict[str, object]:
    asked = request.reasoning
    return {"effort": asked and asked.effort, "summary": asked and asked.summary}


def _text(request: ResponsesRequest) -> dict[str, object]:
    text = request.text
    form = text.format if text and text.format else TextFormat(type="text")
    fields: dict[str, object] = {"type": form.type}
    if form.type == "json_schema":
        fields |= {"name": form.name or "answer", "description": form.description}
        fields |= {"schema": form.schema_, "strict": form.strict is not False}
    return {"format": fields, "verbosity": (text and text.verbosity) or "medium"}


def _tools(request: ResponsesRequest) -> list[dict[str, object]]:
    """Return the functions; tools of other types are not there for the model either."""
    return [
        {
            "type": "function",
            "name": function.name,
            "description": function.description,
            "parameters": function.parameters,
            "strict": function.strict,
        }
        for function in functions_of(request).values()
    ]


def usage_fields(usage: UsageReady) -> dict[str, object]:
    """Return the `usage` object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def part_of(block: Block, text: str, logprobs: Sequence[object] = ()) -> dict[str, object]:
    """Return the content part of a reasoning or text block."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def item_of(block: Block, item_id: str, logprobs: Sequence[object] = ()) -> dict[str, object]:
    """Return the item of a block that has ended."""
    status = "completed" if block.is_complete else "incomplete"
    content = [] if block.kind == "call" else [part_of(block, block.text, logprobs)]
    return _item(block, item_id, status, content, block.text)


def started_item(block: Block, item_id: str) -> dict[str, object]:
    """Return the item of a block that begins."""
    return _item(block, item_id, "in_progress", [], "")


def _item(
    block: Block, item_id: str, status: str, content: list[dict[str, object]], arguments: str
) -> dict[str, object]:
    fields: dict[str, object] = {"id": item_id, "status": status}
    match block.kind:
        case "reasoning":
            return {"type": "reasoning", **fields, "summary": [], "content": content}
        case "text":
            return {"type": "message", **fields, "role": "assistant", "content": content}
        case "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": arguments}
            return {"type": "function_call", **fields, **call}


WireEvent: TypeAlias = tuple[str, dict[str, object]]
"""The type of an event after `response.`, and its other fields."""

_DELTA_NAMES = {
    "reasoning": "reasoning_text",
    "text": "output_text",
    "call": "function_call_arguments",
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

        All tokens of the answer have one, markup and reasoning included.
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
            "usage": None if usage is None else usage_fields(usage),
        }

    def _item(self, block: Block) -> dict[str, object]:
        return item_of(block, self._ids.item(block), self._written(block, self._choice.logprobs))

    def _written(self, block: Block, logprobs: Sequence[TokenLogprob | None]) -> list[Any]:
        has_any = self._write_logprobs is not None and block.kind == "text"
        return self._write_logprobs(logprobs) if self._write_logprobs and has_any else []

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
        match event:
            case BlockStarted():
                yield from self._start_block(block)
            case BlockGrew():
                yield from self._grow_block(block, event.text)
            case BlockEnded():
                yield from self._end_block(block)

    def _start_block(self, block: Block) -> Iterator[WireEvent]:
        item = started_item(block, self._ids.item(block))
        yield "output_item.added", {"output_index": block.index, "item": item}
        if block.kind != "call":
            yield "content_part.added", {**self._place(block), "part": part_of(block, "")}

    def _grow_block(self, block: Block, text: str) -> Iterator[WireEvent]:
        fields = {**self._place(block), "delta": text}
        if block.kind == "text":
            new = self._choice.logprobs[self._num_sent_logprobs :]
            self._num_sent_logprobs = len(self._choice.logprobs)
            fields["logprobs"] = self._written(block, new)
        yield f"{_DELTA_NAMES[block.kind]}.delta", fields

    def _end_block(self, block: Block) -> Iterator[WireEvent]:
        place, logprobs = self._place(block), self._written(block, self._choice.logprobs)
        done = f"{_DELTA_NAMES[block.kind]}.done"
        match block.kind:
            case "call":
                yield done, {**place, "name": block.name, "arguments": block.text}
            case "reasoning":
                yield done, {**place, "text": block.text}
            case "text":
                yield done, {**place, "text": block.text, "logprobs": logprobs}
        if block.kind != "call":
            part = part_of(block, block.text, logprobs)
            yield "content_part.done", {**place, "part": part}
        yield "output_item.done", {"output_index": block.index, "item": self._item(block)}

    def _place(self, block: Block) -> dict[str, object]:
        place: dict[str, object] = {"item_id": self._ids.item(block), "output_index": block.index}
        return place if block.kind == "call" else {**place, "content_index": 0}
