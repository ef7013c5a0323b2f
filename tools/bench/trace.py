"""Request traces: JSON lines in the shape that Mooncake published, with content made from ids.

A line has `timestamp` (ms since the start), `input_length`, `output_length`, `hash_ids` (one per
block of the prompt: equal ids are equal tokens) and here also `session` (requests of one session
follow each other), `pause_ms` (between the last answer of the session and this request) and `topic`
(whose few token ids the prompt has).
The last id of a prompt may stand for a block of which only the beginning is used.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    timestamp: float
    """Milliseconds after the start of the run at which it is due, if its session is ready."""
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    session: str | None = None
    pause_ms: float = 0.0
    topic: int | None = None
    """Whose token ids the prompt is made of; None: all."""


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names the file, the line and the key."""


class PromptMaker:
    """Turns hash ids into token ids: the same id, seed and range always give the same tokens."""

    def __init__(
        self,
        block_tokens: int,
        min_token_id: int,
        max_token_id: int,
        seed: str,
        *,
        topic_tokens: int = 16,
    ) -> None:
        self._block_tokens, self._topic_tokens = block_tokens, topic_tokens
        self._token_ids = list(range(min_token_id, max_token_id + 1))
        self._seed = seed
        self._blocks: dict[tuple[int, int | None], list[int]] = {}

    def prompt(self, request: TraceRequest) -> list[int]:
        """The token ids of a request's prompt."""
        blocks = [self._block(hash_id, request.topic) for hash_id in request.hash_ids]
        tokens = [token for block in blocks for token in block]
        return tokens[: request.input_length]

    def prepare(self, requests: Iterable[TraceRequest]) -> None:
        """Make all blocks now, so that making prompts costs nothing while times are taken."""
        for request in requests:
            for hash_id in request.hash_ids:
                self._block(hash_id, request.topic)

    def _block(self, hash_id: int, topic: int | None) -> list[int]:
        key = hash_id, topic
        if key not in self._blocks:
            rng, token_ids = random.Random(f"{self._seed}:{hash_id}"), self._token_ids
            if topic is not None:  # the same in every run
                num_tokens = min(self._topic_tokens, len(token_ids))
                token_ids = random.Random(f"topic {topic}").sample(token_ids, num_tokens)
            self._blocks[key] = rng.choices(token_ids, k=self._block_tokens)
        return self._blocks[key]


def read_trace(path: Path, block_tokens: int, limit: int) -> list[TraceRequest]:
    """Read the first `limit` requests of a trace, in order of time."""
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip() and len(requests) < limit:
                requests.append(_parse(f"{path}:{number}", line, block_tokens))
    if not requests:
        raise TraceError(f"{path} holds no request")
    return sorted(requests, key=lambda request: request.timestamp)


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write a trace that `read_trace` reads."""
    lines = [
        {
            **asdict(request),
            "timestamp": round(request.timestamp, 3),
            "pause_ms": round(request.pause_ms, 3),
        }
        for request in requests
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def shared_tokens(before: TraceRequest, after: TraceRequest, block_tokens: int) -> int:
    """Count the tokens of the full blocks that two prompts have in common at their beginning."""
    full = min(before.input_length, after.input_length) // block_tokens
    pairs = zip(before.hash_ids[:full], after.hash_ids[:full], strict=True)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same * block_tokens


def num_blocks(num_tokens: int, block_tokens: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // block_tokens)


def _parse(where: str, line: str, block_tokens: int) -> TraceRequest:
    try:
        raw = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise TraceError(f"{where}: a line must be a JSON object, got {type(raw).__name__}")
    input_length = int(_number(where, raw, "input_length", minimum=1))
    ids = raw.get("hash_ids")
    if not isinstance(ids, list) or not all(isinstance(hash_id, int) for hash_id in ids):
        raise TraceError(f"{where}: hash_ids must be a list of integers, got {ids!r}")
    if len(ids) < num_blocks(input_length, block_tokens):
        raise TraceError(
            f"{where}: {len(ids)} hash_ids of {block_tokens} tokens do not cover input_length "
            f"{input_length}; does --trace-block say how long the trace's blocks are?"
        )
    session = raw.get("session")
    return TraceRequest(
        timestamp=_number(where, raw, "timestamp", default=0.0),
        input_length=input_length,
        output_length=int(_number(where, raw, "output_length", minimum=1)),
        hash_ids=tuple(ids),
        session=None if session is None else str(session),
        pause_ms=_number(where, raw, "pause_ms", default=0.0),
        topic=None if raw.get("topic") is None else int(_number(where, raw, "topic")),
    )


def _number(
    where: str, raw: dict[str, Any], key: str, *, minimum: float = 0, default: float | None = None
) -> float:
    value = raw.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= minimum:
        raise TraceError(f"{where}: {key} must be a number of at least {minimum}, got {value!r}")
    return value
