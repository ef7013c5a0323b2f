"""The libraries that compile grammars, by the names of `--structured-outputs-backend`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from whalepod.server.config import GrammarBackendName
from whalepod.server.structured.interface import Compiler


def is_installed(name: GrammarBackendName) -> bool:
    """Return whether a backend's library is there; importing it may take seconds."""
    return importlib.util.find_spec(name) is not None


def new_compiler(
    name: GrammarBackendName, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> Compiler:
    """Return the compiler of a backend for the vocabulary of a `tokenizer.json`.

    vocab_size     width of the model's logits, which may exceed the tokenizer's vocabulary
    eos_token_ids  tokens that end a text; allowed wherever the grammar may end
    """
    match name:
        case "llguidance":
            from whalepod.server.structured.llguidance_backend import LlguidanceCompiler

            return LlguidanceCompiler(tokenizer_json, vocab_size, eos_token_ids)
        case "xgrammar":
            from whalepod.server.structured.xgrammar_backend import XgrammarCompiler

            return XgrammarCompiler(tokenizer_json, vocab_size, eos_token_ids)
