"""The flags of `whalepod bench serve`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from whalepod.tools.client import DEFAULT_URL
from whalepod.tools.flags import require_positive

ProfileName = Literal["random", "chat", "retrieval", "agent", "topics"]
METRICS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    url: Annotated[str, "the server to load"] = DEFAULT_URL
    api_key: Annotated[str | None, "its key, if it asks for one"] = None
    model: Annotated[str | None, "model to ask for; default: the first that it lists"] = None
    timeout_s: Annotated[float, "seconds after which a request counts as failed"] = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadConfig:
    profile: Annotated[
        ProfileName,
        "random: fixed lengths; chat: sessions of short turns; retrieval: questions about shared "
        "documents; agent: a loop over a growing prefix, with pauses; topics: as random, of a few "
        "token ids that change with time, so that load moves between experts",
    ] = "random"
    trace: Annotated[Path | None, "replay this JSONL trace instead of a profile"] = None
    record_trace: Annotated[Path | None, "write what was sent as a JSONL trace"] = None
    trace_block: Annotated[int, "tokens per hash id of the trace (Mooncake's: 512)"] = 64
    num_requests: Annotated[int, "requests of a run; a trace is cut after this many"] = 64
    input_len: Annotated[
        int,
        "prompt tokens: of a request (random), of a document (retrieval), "
        "of the system prompt (chat, agent)",
    ] = 256
    output_len: Annotated[int, "tokens of each answer"] = 64
    turns: Annotated[int, "requests of a session (chat, agent)"] = 8
    turn_len: Annotated[int, "new prompt tokens of each turn or question"] = 64
    num_documents: Annotated[int, "shared documents (retrieval)"] = 4
    num_topics: Annotated[int, "topics that follow each other, again and again (topics)"] = 4
    topic_requests: Annotated[int, "requests until the next topic (topics)"] = 32
    topic_tokens: Annotated[int, "token ids of a topic (topics)"] = 16
    pause_ms: Annotated[int, "mean pause between an answer and the next turn (chat, agent)"] = 200
    min_token_id: Annotated[int, "prompts are random token ids from here ..."] = 300
    max_token_id: Annotated[int, "... to here, both included"] = 1000
    ignore_eos: Annotated[bool, "answers have their full length, if the server can"] = True
    seed: Annotated[int, "of prompts, arrivals and pauses"] = 0

    def __post_init__(self) -> None:
        require_positive(
            self, "trace_block", "num_requests", "input_len", "output_len", "turns", "turn_len"
        )
        if self.num_documents < 1 or self.pause_ms < 0:
            raise ValueError(
                f"num_documents ({self.num_documents}) must be at least 1, pause_ms "
                f"({self.pause_ms}) at least 0"
            )
        require_positive(self, "num_topics", "topic_requests", "topic_tokens")
        if not 0 <= self.min_token_id <= self.max_token_id:
            raise ValueError(
                f"min_token_id ({self.min_token_id}) must be in 0..max_token_id "
                f"({self.max_token_id})"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    concurrency: Annotated[str, "requests at once; 1,4,16 makes three runs; 0: no limit"] = ""
    request_rate: Annotated[float, "open loop: mean arrivals a second; 0: closed loop"] = 0.0
    burstiness: Annotated[float, "shape of the arrivals: 1 Poisson, below 1 in bursts"] = 1.0
    time_scale: Annotated[float, "stretch the arrivals of a trace; 0.5: twice as fast"] = 1.0

    def __post_init__(self) -> None:
        if self.request_rate < 0 or self.burstiness <= 0 or self.time_scale < 0:
            raise ValueError(
                f"request_rate ({self.request_rate}) and time_scale ({self.time_scale}) must be "
                f"at least 0, burstiness ({self.burstiness}) above 0"
            )
        self.limits()

    def limits(self) -> tuple[int, ...]:
        """The concurrency of each run; 0: unlimited."""
        words = [word for word in self.concurrency.split(",") if word.strip()]
        try:
            limits = tuple(int(word) for word in words)
        except ValueError:
            limits = (-1,)
        if any(limit < 0 for limit in limits):
            raise ValueError(f"concurrency must be like 16 or 1,4,16, got {self.concurrency!r}")
        return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportConfig:
    slo: Annotated[str, "goodput's limits in ms, like ttft:500,tpot:50 (also itl, e2el)"] = ""
    json: Annotated[bool, "print one JSON object per run instead of tables"] = False
    out: Annotated[Path | None, "append each run's JSON object to this file"] = None

    def __post_init__(self) -> None:
        self.limits_ms()

    def limits_ms(self) -> dict[str, float]:
        """The latency limits by metric."""
        limits = {}
        for word in filter(None, self.slo.split(",")):
            metric, _, limit = word.partition(":")
            if metric not in METRICS or not limit.replace(".", "", 1).isdigit():
                raise ValueError(f"slo must be like ttft:500,tpot:50 ({METRICS}), got {word!r}")
            limits[metric] = float(limit)
        return limits


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeConfig:
    target: TargetConfig
    workload: WorkloadConfig
    load: LoadConfig
    report: ReportConfig
