"""A checkpoint's chat template, read without its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from whalepod.server.errors import StartupError


def read_chat_template(folder: Path, override: Path | None = None) -> str | None:
    """Return the text of the template that chats get, None without one.

    A file `override` wins, then chat_template.jinja, then tokenizer_config.json, as transformers
    has it. Raises StartupError for a file that cannot be read.
    """
    try:
        for file in (override, folder / "chat_template.jinja"):
            if file is not None and (file is override or file.exists()):
                return file.read_text(encoding="utf-8")
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise StartupError(f"the chat template cannot be read: {error}") from error
    try:
        template = config.get("chat_template")
        if isinstance(template, list):  # of several, by name
            template = {each["name"]: each["template"] for each in template}.get("default")
    except (AttributeError, KeyError, TypeError) as error:
        raise StartupError(f"{file} is not what tokenizers write: {error!r}") from error
    return None if template is None else str(template)
