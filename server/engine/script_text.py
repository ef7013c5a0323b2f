"""Text of the test hook to tokens. Imported only where hooks are enabled."""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

from whalepod.server.engine.scripted import Encode
from whalepod.server.errors import StartupError
from whalepod.server.token_bytes import byte_alphabet

_RUNS = re.compile("([^\\ud800-\\udfff]*)([\\ud800-\\udfff]*)")


def load_encode(folder: Path) -> Encode:
    """Return the encoder of a checkpoint's tokenizer; StartupError when it has none.

    Half a character is written as Python's surrogates (`"\\udcf0\\udc9f"` are the bytes F0 9F);
    each such byte becomes the token of that byte. The encoder raises ValueError for other
    surrogates.
    """
    file = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"test hooks need {file}: {error}") from error
    ids = ((byte, tokenizer.token_to_id(letter)) for letter, byte in byte_alphabet().items())
    byte_tokens = {chr(0xDC00 + byte): token_id for byte, token_id in ids if token_id is not None}

    def encode(piece: str) -> list[int]:
        token_ids: list[int] = []
        for text, lone_bytes in _RUNS.findall(piece):
            token_ids += tokenizer.encode(text, add_special_tokens=False).ids
            for letter in lone_bytes:
                if letter not in byte_tokens:
                    raise ValueError(f"{letter!r} in test_steps is no byte that has a token")
                token_ids.append(byte_tokens[letter])
        return token_ids

    return encode
