"""The JSON objects of the Responses API: the response, its items, and what a request added."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from whalepod.scheduler.params import SamplingParams
from whalepod.server.gateway.blocks import Block
from whalepod.server.gateway.events import UsageReady
from whalepod.server.gateway.response_store import Item
from whalepod.server.gateway.responses_input import functions_of
from whalepod.server.gateway.responses_schema import ResponsesRequest, TextFormat

_ID_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}
_INPUT_ID_PREFIXES = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ids:
    """The ids of a response and of its items: an item's id says where it is."""

    suffix: str
    """What is random in all of them; 32 hexadecimal digits."""

    @property
    def response(self) -> str:
        return f"resp_{self.suffix}"

    def item(self, block: Block) -> str:
        return f"{_ID_PREFIXES[block.kind]}_{self.suffix}{block.index:04x}"

    def input_item(self, item: Item, position: int) -> str:
        """Return the id of an input item: its own, or one that no output item has."""
        prefix = _INPUT_ID_PREFIXES.get(item.get("type", "message"), "msg")
        return str(item.get("id") or f"{prefix}_{self.suffix}i{position:04x}")


def place_of(item_id: str) -> tuple[str, int] | None:
    """Return the response of an output item and its place; None for an id of another kind."""
    _, _, rest = item_id.partition("_")
    suffix, index = rest[:32], rest[32:]
    is_ours = len(suffix) == 32 and 0 < len(index) <= 8 and index.isalnum() and index.isascii()
    try:
        return (Ids(suffix=suffix).response, int(index, 16)) if is_ours else None
    except ValueError:
        return None


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


def listed_items(items: Sequence[Item], ids: Ids) -> list[Item]:
    """Return input items as they are kept and listed: each with an id, texts as parts."""
    listed = []
    for i, item in enumerate(items):
        full: dict[str, Any] = {"type": "message", **item, "id": ids.input_item(item, i)}
        if full["type"] == "message" and isinstance(item.get("content"), str):
            kind = "output_text" if item.get("role") == "assistant" else "input_text"
            part = {"type": kind, "text": item["content"]}
            full["content"] = [part | {"annotations": []} if kind == "output_text" else part]
        listed.append(full | {"status": item.get("status") or "completed"})
    return listed
