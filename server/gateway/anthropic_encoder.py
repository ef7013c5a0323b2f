"""Anthropic's Messages API on the wire."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from whalepod.server.gateway.content_blocks import (
    Block,
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockStarted,
)
from whalepod.server.gateway.encoder import named_frame
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

_PING = named_frame("ping", {"type": "ping"})
_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
_NO_STOP = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}


class AnthropicEncoder:
    """Write the events of one message, or one `message` object."""

    ping = _PING

    def __init__(
        self, message_id: str, model: str, num_prompt_tokens: int, *, shows_thinking: bool = True
    ) -> None:
        """Without `shows_thinking`, thinking blocks stay empty."""
        self._message = {
            "id": message_id, "type": "message", "role": "assistant", "model": model,
        }  # fmt: skip
        self._num_prompt_tokens = num_prompt_tokens
        self._shows_thinking = shows_thinking
        self._choice = Choice(0)
        self._stop: dict[str, object] = {}

    # -- whole ---------------------------------------------------------------------------------

    def body(self, answer: FoldedAnswer) -> dict[str, object]:
        (choice,) = answer.choices
        return {
            **self._message,
            "content": [self._content_block(block) for block in choice.blocks],
            **_stop(choice.finish_reason, choice.stop_reason),
            "usage": _usage(answer.usage),
        }

    def _content_block(self, block: Block) -> dict[str, object]:
        match block.kind:
            case "text":
                return {"type": "text", "text": block.text, "citations": None}
            case "reasoning":
                text = block.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": text, "signature": _signature(block)}
            case "call":
                return {**_tool_use(block), "input": _read_input(block.text)}

    # -- stream --------------------------------------------------------------------------------

    def frames(self, event: Event) -> bytes:
        match event:
            case ChoiceStarted():
                return self._start(event.cached_tokens) + _PING
            case Delta():
                return self._block_frames(event.blocks)
            case Finished():
                self._stop = _stop(event.reason, event.stop_reason)
                return self._block_frames(event.blocks)
            case UsageReady():
                end = _frame("message_delta", delta=self._stop, usage=_usage(event))
                return end + _frame("message_stop")
            case Failed():
                return named_frame("error", event.error.anthropic_body())

    def _start(self, cached_tokens: int) -> bytes:
        num_tokens = self._num_prompt_tokens
        usage = UsageReady(
            prompt_tokens=num_tokens, completion_tokens=0, cached_tokens=cached_tokens
        )
        start: dict[str, object] = {"content": [], **_NO_STOP, "usage": _usage(usage)}
        return _frame("message_start", message={**self._message, **start})

    def _block_frames(self, events: Iterable[BlockEvent]) -> bytes:
        return b"".join(frame for event in events for frame in self._frames_of(event))

    def _frames_of(self, event: BlockEvent) -> Iterator[bytes]:
        block = self._choice.add_to_blocks(event)
        match event:
            case BlockStarted():
                unsigned = {"signature": ""} if block.kind == "reasoning" else {}
                content = self._content_block(block) | unsigned
                yield _frame("content_block_start", index=block.index, content_block=content)
            case BlockGrew(text=text):
                if block.kind != "reasoning" or self._shows_thinking:
                    yield _delta(block, _piece(block, text))
            case BlockEnded():
                if block.kind == "reasoning":
                    signature = _signature(block)
                    yield _delta(block, {"type": "signature_delta", "signature": signature})
                yield _frame("content_block_stop", index=block.index)


def _frame(kind: str, **fields: object) -> bytes:
    return named_frame(kind, {"type": kind, **fields})


def _delta(block: Block, delta: dict[str, object]) -> bytes:
    return _frame("content_block_delta", index=block.index, delta=delta)


def _piece(block: Block, text: str) -> dict[str, object]:
    match block.kind:
        case "text":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            is_first = len(block.texts) == 1
            if is_first and not text.startswith("{"):  # no object: all of it comes at once
                text = orjson.dumps(_read_input(text)).decode()
            return {"type": "input_json_delta", "partial_json": text}


def _tool_use(block: Block) -> dict[str, object]:
    call_id = f"toolu_{block.call_id.removeprefix('call_')}"
    return {"type": "tool_use", "id": call_id, "name": block.name, "caller": {"type": "direct"}}


def _read_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; what is none stands under Anthropic's word for it."""
    try:
        value = orjson.loads(arguments or "{}")
    except orjson.JSONDecodeError:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def _signature(block: Block) -> str:
    """Return what clients send back with a thinking block; nothing is proven by it."""
    return base64.b64encode(hashlib.sha256(block.text.encode()).digest()).decode()


def _stop(reason: str, stop_reason: str | int | None) -> dict[str, object]:
    sequence = stop_reason if isinstance(stop_reason, str) else None
    name = _STOP_REASONS[reason] if sequence is None else "stop_sequence"
    return {**_NO_STOP, "stop_reason": name, "stop_sequence": sequence}


def _usage(usage: UsageReady) -> dict[str, object]:
    """Return Anthropic's `usage`: its input tokens were not in the cache."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": None,
        "service_tier": "standard",
        "inference_geo": None,
    }
