"""The bytes behind each token of a byte-level vocabulary."""

from __future__ import annotations

import json
from typing import Any

from transformers import PreTrainedTokenizerFast


def bytes_of_all_tokens(tokenizer: PreTrainedTokenizerFast) -> list[bytes]:
    """Return the bytes of every token id, b"" for ids without a token.

    Raises ValueError unless the tokenizer's decoder is byte-level BPE (GPT-2's alphabet, as in
    DeepSeek V2 to V3.2).
    """
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"]
    if not _is_byte_level(decoder):
        kind = decoder and decoder.get("type")
        raise ValueError(f"its decoder is {kind}, but only byte-level BPE is supported")
    added = {token_id: token.content for token_id, token in tokenizer.added_tokens_decoder.items()}
    byte_of = byte_alphabet()
    vocab: dict[str, int] = tokenizer.get_vocab()
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        is_text = token_id in added
        table[token_id] = token.encode() if is_text else bytes(byte_of[c] for c in token)
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
