"""Scripted answers: the helpers of tests put `test_steps` of a request where engines look for them.

See `whalepod.server.engine.scripted`. The engines of a test process share one file of turns, and a
request names its turn at the end of its prompt.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_file = tempfile.NamedTemporaryFile("a", suffix=".jsonl", encoding="utf-8")  # noqa: SIM115
SCRIPT = Path(_file.name)
"""The file of turns, which grows."""
_words: dict[tuple[str, ...], str] = {}


def say(steps: Sequence[str]) -> str:
    """Return the word that a prompt ends with so that `steps` are its answer."""
    key = tuple(steps)
    if key not in _words:
        _words[key] = f" #{len(_words)}#"
        _file.write(json.dumps({"contains": _words[key], "steps": key}) + "\n")
        _file.flush()
    return _words[key]


def scripted(body: dict[str, Any]) -> dict[str, Any]:
    """Return a request of any route whose `test_steps` became a word at the end of its prompt."""
    steps = body.get("test_steps")
    body = {key: value for key, value in body.items() if key != "test_steps"}
    for key in ("messages", "input", "prompt") if steps else ():
        if key in body:
            body[key] = _with(body[key], say(steps))
    return body


def _with(value: Any, word: str) -> Any:
    """Append to a text, to each of several prompts, or to the last message that a user wrote."""
    if isinstance(value, str):
        return value + word
    if all(isinstance(item, str) for item in value):
        return [item + word for item in value]
    for place in reversed(range(len(value))):
        item = value[place]
        for key in ("output", "content"):
            if key in item and item.get("role") not in ("assistant", "system", "developer"):
                changed = {**item, key: _with_content(item[key], word)}
                return [*value[:place], changed, *value[place + 1 :]]
    raise AssertionError(f"no message of a user in {value}")


def _with_content(content: Any, word: str) -> Any:
    if isinstance(content, str):
        return content + word
    last = content[-1]
    if "text" in last:
        return [*content[:-1], {**last, "text": last["text"] + word}]
    return [*content[:-1], {**last, "content": _with_content(last["content"], word)}]
