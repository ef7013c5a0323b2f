"""Answers that continue the assistant's last message: DeepSeek's `prefix: true`."""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.schema import Message


def check_prefix(messages: Sequence[Message]) -> None:
    """Raise ApiError unless `prefix` is on the last message only, and that an assistant's text."""
    for i, message in enumerate(messages):
        if not message.prefix:
            continue
        path = f"messages[{i}].prefix"
        if message.role != "assistant" or i != len(messages) - 1:
            raise invalid(path, f"{path}: only the last message, an assistant's, can be continued")
        if i == 0:
            raise invalid(path, f"{path}: there is no message before it to answer")
        if message.tool_calls:
            raise invalid(path, f"{path}: a message with tool_calls cannot be continued")


def prefix_reasoning(message: Message) -> str:
    """Return the reasoning of a message, under either name."""
    return message.reasoning_content or message.reasoning or ""
