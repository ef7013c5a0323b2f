"""Profiles: traces made from a seed, each with the shape of one kind of traffic."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

from whalepod.tools.bench.config import LoadConfig, ProfileName, WorkloadConfig
from whalepod.tools.bench.trace import TraceRequest, num_blocks

_SESSION_STRIDE = 1_000_000
"""Of a profile's hash ids those below it are shared; session s owns those from (s + 1) * stride."""
_PROFILE_STRIDE = 1_000_000_000_000
"""Profiles have ids of their own: a run of one must not warm the cache for another."""


def make_requests(workload: WorkloadConfig) -> list[TraceRequest]:
    """Make the requests of a profile, all due at once; sessions keep their own order."""
    rng = random.Random(workload.seed)
    if workload.profile in ("random", "topics"):
        return [_single(workload, i) for i in range(workload.num_requests)]
    if workload.profile == "retrieval":
        return [_question(workload, i, rng) for i in range(workload.num_requests)]
    turns = workload.turns
    requests: list[TraceRequest] = []
    for session in range(num_blocks(workload.num_requests, turns)):
        requests += _session(workload, session, rng)
    return requests[: workload.num_requests]


def _single(workload: WorkloadConfig, index: int) -> TraceRequest:
    request = _request(workload, index, 0, workload.input_len, workload.output_len)
    if workload.profile == "random":
        return request
    topic = index // workload.topic_requests % workload.num_topics
    return replace(request, topic=topic)


def _question(workload: WorkloadConfig, index: int, rng: random.Random) -> TraceRequest:
    """A question of its own about one of the shared documents."""
    document = rng.randrange(workload.num_documents)
    shared = workload.input_len // workload.trace_block
    length = workload.input_len + workload.turn_len
    request = _request(workload, index, 0, length, workload.output_len)
    own = request.hash_ids[shared:]
    base = _first_id(workload)
    document_ids = range(base + document * shared, base + (document + 1) * shared)
    return replace(request, hash_ids=(*document_ids, *own))


def _session(workload: WorkloadConfig, session: int, rng: random.Random) -> Iterator[TraceRequest]:
    """Turns over a growing prefix: system prompt (shared by all sessions), turns and answers.

    An agent's steps have one length; a chat's turns and answers vary from a half to double.
    """
    varies = workload.profile == "chat"
    shared = workload.input_len // workload.trace_block
    length = workload.input_len
    for turn in range(workload.turns):
        length += _vary(workload.turn_len, rng) if varies else workload.turn_len
        output = _vary(workload.output_len, rng) if varies else workload.output_len
        pause_ms = rng.expovariate(1.0) * workload.pause_ms if turn else 0.0
        request = _request(workload, session, shared, length, output)
        yield replace(request, session=str(session), pause_ms=pause_ms)
        length += output


def _request(
    workload: WorkloadConfig, owner: int, shared: int, input_length: int, output_length: int
) -> TraceRequest:
    """A prompt whose first `shared` blocks are everybody's and whose rest is its owner's."""
    base = _first_id(workload)
    own = base + (owner + 1) * _SESSION_STRIDE
    blocks = num_blocks(input_length, workload.trace_block)
    ids = (*range(base, base + shared), *range(own + shared, own + blocks))
    return TraceRequest(
        timestamp=0.0, input_length=input_length, output_length=output_length, hash_ids=ids
    )


def _first_id(workload: WorkloadConfig) -> int:
    return get_args(ProfileName).index(workload.profile) * _PROFILE_STRIDE


def _vary(mean: int, rng: random.Random) -> int:
    return max(1, round(mean * math.exp2(rng.uniform(-1.0, 1.0))))


def schedule(requests: list[TraceRequest], load: LoadConfig, seed: int) -> list[TraceRequest]:
    """Give each session its arrival: gaps are gamma distributed (burstiness 1: Poisson).

    Sessions of several requests arrive less often, so that the mean rate of requests holds.
    """
    rng = random.Random(f"arrivals:{seed}")
    names = [i if r.session is None else r.session for i, r in enumerate(requests)]
    arrivals_ms, now_ms = dict.fromkeys(names, 0.0), 0.0
    rate = load.request_rate * len(arrivals_ms) / len(requests)
    for name in arrivals_ms:
        arrivals_ms[name] = now_ms
        now_ms += 1e3 * rng.gammavariate(load.burstiness, 1 / (rate * load.burstiness))
    return [replace(r, timestamp=arrivals_ms[n]) for r, n in zip(requests, names, strict=True)]
