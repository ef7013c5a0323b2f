"""Log-probabilities in the two shapes of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.tokenizer import TextTokenizer

LOWEST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a token that cannot be."""


def chat_logprobs(
    logprobs: Sequence[TokenLogprob | None], num_top: int, tokenizer: TextTokenizer
) -> dict[str, object]:
    """Return chat's `logprobs`: one entry per token with exact bytes and its alternatives."""

    def entry(token_id: int, logprob: float) -> dict[str, object]:
        return {
            "token": tokenizer.printable(token_id),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(tokenizer.bytes_of(token_id)),
        }

    content = [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [entry(*alternative) for alternative in token.top[:num_top]],
        }
        for token in logprobs
        if token is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    text_offsets: Sequence[int],
    num_top: int,
    tokenizer: TextTokenizer,
) -> dict[str, object]:
    """Return completions' `logprobs`: four lists of one entry per token.

    The first token of an echoed prompt has neither a log-probability nor alternatives.
    """

    def alternatives(token: TokenLogprob | None) -> dict[str, float] | None:
        if token is None:
            return None
        chosen = (token.token_id, token.logprob)  # always there, however unlikely
        pairs = [*token.top[:num_top], chosen]
        return {tokenizer.printable(i): max(value, LOWEST_LOGPROB) for i, value in pairs}

    return {
        "tokens": [tokenizer.printable(token_id) for token_id in token_ids],
        "token_logprobs": [token and max(token.logprob, LOWEST_LOGPROB) for token in logprobs],
        "top_logprobs": [alternatives(token) for token in logprobs],
        "text_offset": list(text_offsets),
    }
