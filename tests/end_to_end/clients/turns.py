"""What the server answers to the questions of the pages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.gateway.chat_formats.transcripts import block, v31_call

HELLO = "Hello, I am scripted."
SUNNY = "It is sunny in Paris."
NOTES = "The harbour opens at nine."
NOTED = "The file says when the harbour opens."


def _call(tool: str, /, **arguments: Any) -> list[str]:
    """Write a call of a tool, cut before its arguments.

    Cuts inside would make other tokens, which the grammar of strict calls does not allow.
    """
    text = block(v31_call(tool, json.dumps(arguments)))
    start = text.index("{")
    return [text[:start], text[start:]]


TURNS: list[dict[str, Any]] = [
    {"contains": "sunny", "steps": ["It is ", "sunny in", " Paris."]},
    {"contains": NOTES, "steps": [NOTED]},
    {"contains": "weather in Paris", "steps": _call("get_weather", city="Paris")},
    {"contains": "Anna is 31", "steps": ['{"name":"An', 'na","age":31}']},
    {"contains": "Bob is 27", "steps": _call("Person", name="Bob", age=27)},
    {"contains": "Read notes.txt", "steps": _call("read", path="notes.txt")},
    {"contains": "What is in notes.txt", "steps": _call("exec_command", cmd="cat notes.txt")},
    {"contains": "who are you?", "steps": ["Hello, ", "I am ", "scripted."]},
]


def write_script(path: Path) -> Path:
    """Write the turns. A question without a turn is the model's own to answer."""
    path.write_text("\n".join(map(json.dumps, TURNS)), encoding="utf-8")
    return path
