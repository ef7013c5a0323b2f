"""Plays a workload against a server and reports what was measured."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress

from whalepod.tools.bench.config import BenchServeConfig, LoadConfig, WorkloadConfig
from whalepod.tools.bench.http import Endpoint, RequestFailed
from whalepod.tools.bench.profiles import make_requests, schedule
from whalepod.tools.bench.report import format_report
from whalepod.tools.bench.stats import RequestRecord, summarize
from whalepod.tools.bench.trace import (
    PromptMaker,
    TraceRequest,
    read_trace,
    shared_tokens,
    write_trace,
)
from whalepod.tools.client import Client, ClientError, root_url

DEFAULT_CONCURRENCY = 8


def bench_serve(config: BenchServeConfig) -> int:
    """Load a running OpenAI-compatible server and measure it.

    Closed loop with --concurrency (a list runs one after the other), open loop with
    --request-rate, or the arrivals of a --trace.
    """
    with Client(config.target.url, config.target.api_key, timeout_s=10.0) as client:
        model = config.target.model or client.first_model()
    ok = True
    for run, limit in enumerate(run_limits(config.workload, config.load)):
        result = play_once(config, model, limit, run)
        _publish(config, result)
        ok = ok and not result["failed"]
    return 0 if ok else 1


def play_once(config: BenchServeConfig, model: str, limit: int, run: int) -> dict[str, Any]:
    """Make one run with at most `limit` sessions at once; `run` chooses the prompts' content.

    Raises ClientError if the server refuses such requests.
    """
    requests = make_workload(config.workload, config.load)
    # on uvloop, which halves the client's own work per chunk
    return uvloop.run(Player(config, model).play(requests, limit, run))


def make_workload(workload: WorkloadConfig, load: LoadConfig) -> list[TraceRequest]:
    """Read the trace or make the profile, with the arrivals that the load asks for."""
    if workload.trace:
        requests = read_trace(workload.trace, workload.trace_block, workload.num_requests)
    else:
        requests = make_requests(workload)
    if load.request_rate:
        return schedule(requests, load, workload.seed)
    if load.concurrency or not workload.trace:
        return [replace(request, timestamp=0.0) for request in requests]
    first = requests[0].timestamp
    return [replace(r, timestamp=(r.timestamp - first) * load.time_scale) for r in requests]


def run_limits(workload: WorkloadConfig, load: LoadConfig) -> tuple[int, ...]:
    """The most sessions at once, per run. Arrivals without a limit are an open loop."""
    is_open_loop = bool(load.request_rate or workload.trace)
    return load.limits() or ((0,) if is_open_loop else (DEFAULT_CONCURRENCY,))


def sessions_of(requests: Sequence[TraceRequest]) -> list[list[TraceRequest]]:
    """Group requests that follow each other; one without a session stands alone."""
    sessions: dict[object, list[TraceRequest]] = {}
    for index, request in enumerate(requests):
        sessions.setdefault(index if request.session is None else request.session, []).append(
            request
        )
    return list(sessions.values())


class Player:
    """Sends the requests of a workload at their time and in their session's order."""

    def __init__(self, config: BenchServeConfig, model: str) -> None:
        self._config, self._model = config, model
        self._endpoint = Endpoint(root_url(config.target.url), config.target.api_key)

    async def play(self, requests: Sequence[TraceRequest], limit: int, run: int) -> dict[str, Any]:
        """Make one run with at most `limit` sessions at once (0: no limit) and sum it up."""
        workload, block_tokens = self._config.workload, self._config.workload.trace_block
        # Each run has its own content: the prefix cache still holds that of the run before.
        prompts = self._prompts(f"{workload.seed}:{run}")
        prompts.prepare(requests)
        await self._check_server()
        sessions = sessions_of(requests)
        turnstile = asyncio.Semaphore(limit or len(sessions))
        origin_s = time.perf_counter()
        played: list[tuple[TraceRequest, RequestRecord]] = []

        async def play_session(session: Sequence[TraceRequest]) -> None:
            await _sleep_until(origin_s + session[0].timestamp / 1e3)
            async with turnstile:
                ready_s = time.perf_counter() if limit else origin_s
                for before, request in zip([None, *session], session, strict=False):
                    due_s = max(
                        origin_s + request.timestamp / 1e3, ready_s + request.pause_ms / 1e3
                    )
                    record = await self._send(request, prompts.prompt(request), due_s)
                    resent = shared_tokens(before, request, block_tokens) if before else 0
                    played.append((request, replace(record, resent_tokens=resent)))
                    progress.advance(shown)
                    ready_s = record.end_s

        with Progress(console=Console(stderr=True), transient=True) as progress:
            shown = progress.add_task("requests", total=len(requests))
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(play_session(session))
        if workload.record_trace:
            write_trace(workload.record_trace, _as_sent(played, origin_s))
        result = summarize([record for _, record in played], self._config.report.limits_ms())
        return self._label(limit) | {"num_prompts": len(requests)} | result

    async def _send(self, request: TraceRequest, prompt: list[int], due_s: float) -> RequestRecord:
        body = self._body(prompt, request.output_length)
        await _sleep_until(due_s)
        try:
            answer = await self._endpoint.complete(body, self._config.target.timeout_s)
        except RequestFailed as error:
            return RequestRecord(start_s=due_s, end_s=time.perf_counter(), error=str(error))
        num_tokens = answer.usage.get("completion_tokens")
        return RequestRecord(
            start_s=due_s,
            end_s=time.perf_counter(),
            chunk_times_s=tuple(answer.chunk_times_s),
            prompt_tokens=answer.usage.get("prompt_tokens") or 0,
            completion_tokens=len(answer.chunk_times_s) if num_tokens is None else num_tokens,
            cached_tokens=answer.cached_tokens,
        )

    async def _check_server(self) -> None:
        """Fail before the run, with the server's own words, if it refuses such requests."""
        prompt = self._prompts("check").prompt(
            TraceRequest(timestamp=0.0, input_length=8, output_length=1, hash_ids=(0,))
        )
        try:
            await self._endpoint.complete(self._body(prompt, 1), self._config.target.timeout_s)
        except RequestFailed as error:
            raise ClientError(
                f"{self._config.target.url}: a trial request failed: {error}"
            ) from None

    def _prompts(self, seed: str) -> PromptMaker:
        w = self._config.workload
        topic_tokens = w.topic_tokens
        return PromptMaker(
            w.trace_block, w.min_token_id, w.max_token_id, seed, topic_tokens=topic_tokens
        )

    def _body(self, prompt: list[int], output_length: int) -> dict[str, Any]:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output_length,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,  # tokens without text, which random models write, count, too
        }
        return body | ({"ignore_eos": True} if self._config.workload.ignore_eos else {})

    def _label(self, limit: int) -> dict[str, Any]:
        config = {name: asdict(getattr(self._config, name)) for name in ("workload", "load")}
        config["workload"].pop("record_trace")
        text = json.dumps([self._model, limit, config], sort_keys=True, default=str)
        return {
            "model_id": self._model,
            "profile": str(self._config.workload.trace or self._config.workload.profile),
            "max_concurrency": limit or None,
            "request_rate": self._config.load.request_rate or None,
            "burstiness": self._config.load.burstiness,
            "seed": self._config.workload.seed,
            "config_hash": hashlib.sha256(text.encode()).hexdigest()[:16],
        }


def _as_sent(
    played: Sequence[tuple[TraceRequest, RequestRecord]], origin_s: float
) -> list[TraceRequest]:
    sent = sorted(played, key=lambda pair: pair[1].start_s)
    return [
        replace(
            request,
            timestamp=1e3 * (record.start_s - origin_s),
            output_length=record.completion_tokens or request.output_length,
        )
        for request, record in sent
    ]


async def _sleep_until(moment_s: float) -> None:
    if (delay_s := moment_s - time.perf_counter()) > 0:
        await asyncio.sleep(delay_s)


def _publish(config: BenchServeConfig, result: dict[str, Any]) -> None:
    line = json.dumps(result)
    print(line if config.report.json else format_report(result), flush=True)
    if config.report.out:
        with config.report.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
