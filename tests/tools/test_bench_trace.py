from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from whalepod.tools.bench.config import LoadConfig, WorkloadConfig
from whalepod.tools.bench.profiles import make_requests, schedule
from whalepod.tools.bench.trace import (
    PromptMaker,
    TraceError,
    TraceRequest,
    num_blocks,
    read_trace,
    shared_tokens,
    write_trace,
)


def common_blocks(a: TraceRequest, b: TraceRequest) -> int:
    pairs = zip(a.hash_ids, b.hash_ids, strict=False)
    return next(
        (i for i, (x, y) in enumerate(pairs) if x != y), min(len(a.hash_ids), len(b.hash_ids))
    )


def request(*hash_ids: int, length: int) -> TraceRequest:
    return TraceRequest(timestamp=0, input_length=length, output_length=1, hash_ids=hash_ids)


def test_equal_hash_ids_are_equal_tokens_in_every_maker() -> None:
    makers = [PromptMaker(4, 10, 20, "seed") for _ in range(2)]
    a = makers[0].prompt(request(1, 2, 3, length=11))
    b = makers[1].prompt(request(1, 2, 9, length=9))
    assert a[:8] == b[:8]
    assert a[8] != b[8] or a[8:] != b[8:]
    assert (len(a), len(b)) == (11, 9)
    assert all(10 <= token <= 20 for token in a + b)
    assert PromptMaker(4, 10, 20, "other").prompt(request(1, 2, 3, length=11)) != a


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [
        TraceRequest(timestamp=0, input_length=65, output_length=3, hash_ids=(0, 1)),
        TraceRequest(
            timestamp=7.5, input_length=64, output_length=3, hash_ids=(0,), session="a", pause_ms=2
        ),
    ]
    write_trace(path, requests)
    assert read_trace(path, 64, limit=10) == requests
    assert read_trace(path, 64, limit=1) == requests[:1]


def test_a_published_trace_with_blocks_of_512_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    line = {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [*range(14)]}
    path.write_text(json.dumps(line) + "\n")
    (read,) = read_trace(path, 512, limit=10)
    assert (read.input_length, read.session) == (6955, None)
    with pytest.raises(TraceError, match=r"14 hash_ids of 64 tokens do not cover .* --trace-block"):
        read_trace(path, 64, limit=10)


@pytest.mark.parametrize(
    ("line", "fragment"),
    [
        ("{", ":1: not JSON"),
        ("[]", ":1: a line must be a JSON object"),
        ('{"input_length": 0}', "input_length must be a number of at least 1, got 0"),
        ('{"input_length": 1, "hash_ids": "x"}', "hash_ids must be a list of integers"),
        ('{"input_length": 1, "hash_ids": [1]}', "output_length must be a number"),
        ("", "holds no request"),
    ],
)
def test_a_broken_trace_is_an_error_with_line_and_key(
    tmp_path: Path, line: str, fragment: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(TraceError, match=fragment):
        read_trace(path, 64, limit=10)


@pytest.mark.parametrize("profile", ["random", "chat", "retrieval", "agent", "topics"])
def test_profiles_are_repeatable_and_covered_by_their_hash_ids(profile: str) -> None:
    workload = WorkloadConfig(profile=profile, num_requests=20, input_len=130)  # type: ignore[arg-type]
    requests = make_requests(workload)
    assert requests == make_requests(workload)
    assert len(requests) == 20
    assert all(len(r.hash_ids) == num_blocks(r.input_length, 64) for r in requests)


def test_random_requests_share_nothing() -> None:
    requests = make_requests(WorkloadConfig(num_requests=4))
    ids = [hash_id for r in requests for hash_id in r.hash_ids]
    assert len(ids) == len(set(ids))


def test_an_agents_prompt_begins_with_its_whole_last_prompt() -> None:
    workload = WorkloadConfig(profile="agent", num_requests=16, turns=8, input_len=256)
    requests = make_requests(workload)
    for before, after in itertools.pairwise(requests[:8]):
        assert after.session == before.session
        assert after.input_length == before.input_length + workload.output_len + workload.turn_len
        assert common_blocks(before, after) == len(before.hash_ids)
    assert common_blocks(requests[0], requests[8]) == 256 // 64  # the system prompt, and no more


def test_retrieval_shares_documents_not_questions() -> None:
    workload = WorkloadConfig(
        profile="retrieval", num_requests=40, num_documents=2, input_len=640, turn_len=64
    )
    requests = make_requests(workload)
    documents = {r.hash_ids[:10] for r in requests}
    assert len(documents) == 2
    assert len({r.hash_ids[10:] for r in requests}) == 40


def test_arrivals_are_repeatable_and_have_the_mean_rate() -> None:
    requests = [request(i, length=1) for i in range(4000)]
    load = LoadConfig(request_rate=50.0)
    scheduled = schedule(requests, load, seed=3)
    assert scheduled == schedule(requests, load, seed=3)
    assert scheduled[-1].timestamp / 1e3 == pytest.approx(4000 / 50.0, rel=0.1)


def test_a_session_arrives_once_and_the_rate_of_requests_holds() -> None:
    workload = WorkloadConfig(profile="agent", num_requests=8000, turns=4)
    scheduled = schedule(make_requests(workload), LoadConfig(request_rate=40.0), seed=0)
    arrivals = {r.session: r.timestamp for r in scheduled}
    assert all(r.timestamp == arrivals[r.session] for r in scheduled)
    assert max(arrivals.values()) / 1e3 == pytest.approx(8000 / 40.0, rel=0.1)


def test_a_topic_is_written_in_few_tokens_until_the_next_one_comes(tmp_path: Path) -> None:
    workload = WorkloadConfig(
        profile="topics", num_requests=12, num_topics=3, topic_requests=2, topic_tokens=5
    )
    requests = make_requests(workload)
    assert [r.topic for r in requests] == [0, 0, 1, 1, 2, 2] * 2
    write_trace(tmp_path / "trace", requests)
    assert read_trace(tmp_path / "trace", 64, 12) == requests
    words: dict[int, set[int]] = {}
    for seed in ("one run", "another"):
        maker = PromptMaker(64, 300, 1000, seed, topic_tokens=5)
        prompts = [maker.prompt(request) for request in requests]
        assert len({tuple(prompt) for prompt in prompts}) == 12, "no prompt comes twice"
        for request, prompt in zip(requests, prompts, strict=True):
            assert request.topic is not None
            assert words.setdefault(request.topic, set(prompt)) == set(prompt)
    assert [len(found) for found in words.values()] == [5, 5, 5]
    assert len(set.union(*words.values())) > 10


def test_low_burstiness_clusters_arrivals() -> None:
    requests = [request(i, length=1) for i in range(2000)]

    def squared_variation(burstiness: float) -> float:
        load = LoadConfig(request_rate=1.0, burstiness=burstiness)
        times = [r.timestamp / 1e3 for r in schedule(requests, load, seed=1)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        mean = sum(gaps) / len(gaps)
        return sum((gap - mean) ** 2 for gap in gaps) / len(gaps) / mean**2

    assert squared_variation(1.0) == pytest.approx(1.0, rel=0.2)
    assert squared_variation(0.25) == pytest.approx(4.0, rel=0.3)


def test_only_full_blocks_are_shared() -> None:
    before, after = request(1, 2, 3, length=11), request(1, 2, 3, 4, length=16)
    assert shared_tokens(before, after, 4) == 8
    assert shared_tokens(after, after, 4) == 16
    assert shared_tokens(before, request(9, 2, 3, length=12), 4) == 0


def test_profiles_have_no_block_in_common() -> None:
    names = ("random", "chat", "retrieval", "agent", "topics")
    workloads = [WorkloadConfig(profile=name, num_requests=20) for name in names]  # type: ignore[arg-type]
    ids = [{i for r in make_requests(workload) for i in r.hash_ids} for workload in workloads]
    assert len(set.union(*ids)) == sum(map(len, ids))


@pytest.mark.parametrize("fields", [{"num_documents": 0}, {"pause_ms": -1}])
def test_a_workload_that_cannot_be_is_refused_by_name(fields: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        WorkloadConfig(**fields)  # type: ignore[arg-type]
