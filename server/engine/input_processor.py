"""What an engine makes of a submitted request, or refuses before it queues anything."""

from __future__ import annotations

import random
from dataclasses import replace

from whalepod.scheduler.params import Constraint
from whalepod.scheduler.request import Request
from whalepod.server.messages import Submit

MAX_NUM_SEQUENCES = 128
"""Answers to one prompt; OpenAI's own limit."""


class InputProcessor:
    """Turns what a gateway submits into what a scheduler queues."""

    def __init__(self, vocab_size: int, seed: int | str) -> None:
        """`seed` starts the generator of the seeds of requests that bring none."""
        self._vocab_size = vocab_size
        self._seeds = random.Random(seed)

    def reseed(self, seed: str) -> None:
        """Start the generator of seeds anew."""
        self._seeds = random.Random(seed)

    def take(self, submit: Submit) -> Request:
        """Return the request. Raises ValueError for what cannot be run."""
        check_submit(submit, self._vocab_size)
        params = submit.params
        if params.seed is None:  # fixed here, so that a resumed request goes on the same way
            params = replace(params, seed=self._seeds.getrandbits(63))
        return Request(
            request_id=submit.request_id,
            prompt_token_ids=submit.prompt_token_ids,
            params=params,
            num_sequences=submit.num_sequences,
            priority=submit.priority,
            cache_salt=submit.cache_salt,
        )


def check_submit(submit: Submit, vocab_size: int) -> None:
    """Raise ValueError for a request that no engine with this vocabulary could run."""
    params = submit.params
    if not 1 <= submit.num_sequences <= MAX_NUM_SEQUENCES:
        raise ValueError(f"n must be in 1..{MAX_NUM_SEQUENCES}, got {submit.num_sequences}")
    for name, token_ids in (
        ("prompt", submit.prompt_token_ids),
        ("logit_bias", tuple(params.logit_bias)),
        ("stop_token_ids", params.stop_token_ids),
        ("constraint", _tokens_of(params.constraint)),
    ):
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
            raise ValueError(f"{name} holds token {wrong}; the vocabulary is 0..{vocab_size - 1}")


def _tokens_of(constraint: Constraint | None) -> tuple[int, ...]:
    if constraint is None:
        return ()
    single = (constraint.starts_after, constraint.reasoning_start)
    several = constraint.banned_before + constraint.reasoning_ends
    return tuple(token for token in single if token is not None) + several
