"""The Responses API on the wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.blocks import (
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
from whalepod.server.gateway.responses_object import (
    Ids,
    item_of,
    part_of,
    started_item,
    usage_fields,
)

WireEvent: TypeAlias = tuple[str, dict[str, object]]
"""The type of an event behind `response.`, and its other fields."""

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
        write_logprobs: Callable[[Sequence[TokenLogprob | None]], list[Any]] | None = None,
    ) -> None:
        """`write_logprobs` turns log-probabilities into JSON; None when nobody asked for them.

        They are those of all tokens of the answer, markup and reasoning included.
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
