"""What is decided about a request before it is queued."""

from __future__ import annotations

from whalepod.scheduler.errors import TooLong
from whalepod.scheduler.request import Request


def max_total_tokens(request: Request, *, max_model_len: int, capacity_tokens: int) -> int:
    """Clamp prompt and answer together to what fits into the model and into the whole cache.

    Raises TooLong when not even one token of an answer would fit.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    wanted = request.params.max_tokens
    least = num_prompt_tokens + (0 if wanted == 0 else 1)
    if least > max_model_len:
        raise TooLong(
            "context_length_exceeded",
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has "
            f"{num_prompt_tokens}: shorten the prompt so that an answer fits behind it",
        )
    if least > capacity_tokens:
        raise TooLong(
            "too_large",
            f"The prompt has {num_prompt_tokens} tokens and the cache of this server holds "
            f"{capacity_tokens}: shorten the prompt, or give the server more cache memory",
        )
    limit = min(max_model_len, capacity_tokens)
    return limit if wanted is None else min(limit, num_prompt_tokens + wanted)
