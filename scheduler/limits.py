"""What is refused before it is queued, and how long an answer may become."""

from __future__ import annotations


class RequestRejected(Exception):
    """The user asked for something that cannot be: refused before it costs anything.

    `code` is machine readable ("context_length_exceeded", "too_large", "queue_full",
    "invalid_request", ...); `message` says what to change; `param` names the field of the request,
    when one is to blame.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


def max_total_tokens(
    num_prompt_tokens: int,
    max_tokens: int | None,
    *,
    max_model_len: int,
    capacity_tokens: int | None = None,
    param: str | None = None,
) -> int:
    """Return the most tokens of prompt and answer together: what was asked for, cut to what fits.

    max_tokens       of the answer; None: as many as fit
    max_model_len    tokens that the model can attend to
    capacity_tokens  tokens that the whole cache holds; None: not known here
    param            what a client calls its prompt: "messages"

    Raises RequestRejected when not even one token of an answer would fit (none is needed if
    `max_tokens` is 0).
    """
    least = num_prompt_tokens + (0 if max_tokens == 0 else 1)
    if least > max_model_len:
        raise prompt_too_long(str(num_prompt_tokens), max_model_len, param)
    limit = max_model_len
    if capacity_tokens is not None:
        if least > capacity_tokens:
            raise RequestRejected(
                "too_large",
                f"The prompt has {num_prompt_tokens} tokens and the cache of this server holds "
                f"{capacity_tokens}: shorten the prompt, or give the server more cache memory",
                param,
            )
        limit = min(limit, capacity_tokens)
    return limit if max_tokens is None else min(limit, num_prompt_tokens + max_tokens)


def prompt_too_long(num_tokens: str, max_model_len: int, param: str | None) -> RequestRejected:
    """Return the refusal of a prompt of `num_tokens`: a number, or "at least" one."""
    name = param or "prompt"
    return RequestRejected(
        "context_length_exceeded",
        f"This model's maximum context length is {max_model_len} tokens, answer included, and "
        f"the length of the {name} is {num_tokens}: shorten the {name}",
        param,
    )


def queue_full(num_queued: int, limit: int) -> RequestRejected:
    """Return the refusal of a request that may be taken later."""
    return RequestRejected(
        "queue_full", f"{num_queued} requests wait already and the queue holds {limit}: retry later"
    )
