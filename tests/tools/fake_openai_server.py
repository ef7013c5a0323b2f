"""A small OpenAI-compatible server for tests, with a prefix cache that only counts."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

BLOCK_TOKENS = 64


@dataclass
class FakeServer:
    """Answers with the tokens "t0 t1 ..." and remembers the request bodies."""

    url: str = ""
    step_s: float = 0.0
    api_key: str | None = None
    ready: bool = True
    models: list[Any] = field(default_factory=lambda: [{"id": "fake"}])
    pages: dict[str, Any] = field(default_factory=dict)
    """What other routes answer, by path; posts to them are noted in `bodies`."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    fail_after: int | None = None
    """Completions after so many get a 503."""
    left_early: threading.Event = field(default_factory=threading.Event)
    """Set when a client closed a stream before its end."""
    _blocks: set[tuple[int, ...]] = field(default_factory=set)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        key = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.api_key and key != f"Bearer {self.api_key}":
            await self._reply(send, 401, _error("wrong key"))
        elif scope["method"] == "GET":
            await self._get(scope["path"], send)
        else:
            await self._post(scope["path"], json.loads(body), receive, send)

    async def _get(self, path: str, send: Any) -> None:
        if path == "/v1/models":
            await self._reply(send, 200, {"data": self.models})
        elif path in ("/ready", "/health"):
            await self._reply(send, 200 if self.ready else 503, {"reason": "loading"})
        elif path == "/metrics":
            await self._reply(send, 200, METRICS)
        elif path in self.pages:
            await self._reply(send, 200, self.pages[path])
        else:
            await self._reply(send, 404, _error(f"no route {path}"))

    async def _post(self, path: str, body: dict[str, Any], receive: Any, send: Any) -> None:
        self.bodies.append(body)
        if path in self.pages:
            await self._reply(send, 200, {})
            return
        if self.fail_after is not None and len(self.bodies) > self.fail_after:
            await self._reply(send, 503, _error("the engine is lost"))
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        watcher = asyncio.create_task(self._watch(receive))
        async for event in self._events(path, body):
            if self.left_early.is_set():
                return
            data = event if isinstance(event, str) else json.dumps(event)
            chunk = f"data: {data}\n\n".encode()
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        watcher.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left_early.set()

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        num_tokens = body.get("max_tokens", 3)
        usage = self._usage(body.get("prompt", ""), num_tokens)
        for i in range(num_tokens):
            text = f"t{i} "
            key = {"delta": {"content": text}} if "chat" in path else {"text": text}
            yield {"choices": [{"index": 0, **key, "finish_reason": None}], "usage": None}
            await self._pause()
        yield {"choices": [], "usage": usage}
        yield "[DONE]"

    async def _pause(self) -> None:
        """Take one step's time, less if the client leaves."""
        end = asyncio.get_running_loop().time() + self.step_s
        while not self.left_early.is_set() and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(min(0.02, self.step_s))

    def _usage(self, prompt: Any, num_tokens: int) -> dict[str, Any]:
        length, cached, blocks = len(prompt), 0, []
        if isinstance(prompt, list):
            blocks = [
                tuple(prompt[: i + BLOCK_TOKENS])
                for i in range(0, length - BLOCK_TOKENS + 1, BLOCK_TOKENS)
            ]
            cached = BLOCK_TOKENS * sum(block in self._blocks for block in blocks)
            self._blocks.update(blocks)
        return {
            "prompt_tokens": length,
            "completion_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def _reply(self, send: Any, status: int, content: dict[str, Any] | str) -> None:
        data = content if isinstance(content, str) else json.dumps(content)
        headers = [(b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data.encode()})


METRICS = """# HELP whalepod_num_requests_running running
# TYPE whalepod_num_requests_running gauge
whalepod_num_requests_running{engine="0"} 2.0
whalepod_num_requests_waiting 1.0
whalepod_kv_cache_usage_perc 0.25
whalepod_prefix_cache_queries_total{engine="0"} 150.0
whalepod_prefix_cache_queries_total{engine="1"} 50.0
whalepod_prefix_cache_hits_total 50.0
whalepod_generation_tokens_total 1.234e+03
"""


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "x", "param": None, "code": None}}
