"""The bytes of each token of a byte-level vocabulary."""

from __future__ import annotations

from typing import Any

import orjson


def bytes_of_tokens(tokenizer_json: str) -> list[bytes]:
    """Return the bytes of every token id of a `tokenizer.json`, b"" for ids without a token.

    Raises ValueError unless the tokenizer's decoder is byte-level BPE (GPT-2's alphabet, as in
    DeepSeek V2 to V3.2).
    """
    data = orjson.loads(tokenizer_json)
    decoder = data["decoder"]
    if not _is_byte_level(decoder):
        kind = decoder and decoder.get("type")
        raise ValueError(f"its decoder is {kind}, but only byte-level BPE is supported")
    byte_of = byte_alphabet()
    vocab: dict[str, int] = data["model"]["vocab"]
    texts: dict[int, bytes] = {
        token["id"]: token["content"].encode() for token in data["added_tokens"]
    }
    table = [b""] * (max([*vocab.values(), *texts], default=-1) + 1)
    for token, token_id in vocab.items():
        if token_id not in texts:
            table[token_id] = bytes(byte_of[letter] for letter in token)
    for token_id, text in texts.items():
        table[token_id] = text
    return table


def byte_alphabet() -> dict[str, int]:
    """Map each letter of the byte-level alphabet to its byte (GPT-2, `bytes_to_unicode`).

    Printable bytes stand for themselves; the others are numbered from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(len(hidden))]
    return dict(zip(letters, printable + hidden, strict=True))


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return any(_is_byte_level(part) for part in decoder["decoders"])
    return bool(decoder["type"] == "ByteLevel")
