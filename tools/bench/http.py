"""Streams completions with little work per token: the client shares its cores with the server.

An HTTP client library spends several times a parser's time on each chunk, so this reads the
socket itself: httptools (uvicorn's parser) takes the HTTP apart, and an event is decoded as JSON
only if it carries usage or an error. Of the others only the time counts.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httptools
import orjson

_NO_CHOICE = re.compile(rb'"choices":\s*\[\s*\]')
_HAS_FACTS = re.compile(rb'"usage":\s*\{|"error":\s*[{"]')
_READ_BYTES = 64 * 1024
_MAX_ERROR_BYTES = 64 * 1024


class RequestFailed(Exception):
    """A request that got no complete answer; the message groups failures in the report."""


@dataclass(slots=True)
class Answer:
    """What came back, and when (seconds of `time.perf_counter`)."""

    chunk_times_s: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)

    @property
    def cached_tokens(self) -> int:
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)


class Endpoint:
    """One server's `/v1/completions`."""

    def __init__(self, root_url: str, api_key: str | None) -> None:
        parts = urlsplit(root_url)
        self._host = parts.hostname or "127.0.0.1"
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {parts.path}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\n{authorization}"
            "Content-Type: application/json\r\nAccept: text/event-stream\r\nConnection: close\r\n"
        )

    async def complete(self, body: Mapping[str, Any], timeout_s: float) -> Answer:
        """Post one request and read its stream to the end. Raises RequestFailed."""
        payload = orjson.dumps(body)
        head = f"{self._head}Content-Length: {len(payload)}\r\n\r\n".encode()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(head + payload)
        except TimeoutError:
            raise RequestFailed(f"no complete answer within {timeout_s:g} s") from None
        except OSError as error:
            raise RequestFailed(f"connection failed: {error}") from None
        except httptools.HttpParserError as error:
            raise RequestFailed(f"not an HTTP answer: {error}") from None

    async def _exchange(self, request: bytes) -> Answer:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._ssl)
        try:
            writer.write(request)
            response = _Response()
            while not response.complete:
                data = await reader.read(_READ_BYTES)
                if not data:
                    break
                response.feed(data, time.perf_counter())
        finally:
            writer.close()
        return response.result()


class _Response:
    """Parses one HTTP response incrementally; its methods are httptools' callbacks."""

    def __init__(self) -> None:
        self.complete = False
        self._answer = Answer()
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self._done = False
        self._failure: str | None = None

    def feed(self, data: bytes, now: float) -> None:
        """Take bytes that arrived at `now`."""
        self._now = now
        self._parser.feed_data(data)
        if self._failure is not None:  # what a callback raises, httptools hides
            raise RequestFailed(self._failure)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the decoded body (called by httptools)."""
        if self._parser.get_status_code() != 200:
            self._rest = (self._rest + body)[:_MAX_ERROR_BYTES]
            return
        *events, self._rest = (self._rest + body).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._on_event(event)

    def on_message_complete(self) -> None:
        """Note the end of the body (called by httptools)."""
        self.complete = True

    def _on_event(self, event: bytes) -> None:
        if event == b"data: [DONE]":
            self._done = True
            return
        if _HAS_FACTS.search(event):
            self._read_facts(event)
        if b'"choices"' in event and not _NO_CHOICE.search(event):
            self._answer.chunk_times_s.append(self._now)

    def _read_facts(self, event: bytes) -> None:
        data = orjson.loads(event.removeprefix(b"data:"))
        if error := data.get("error"):
            message = error.get("message", error) if isinstance(error, dict) else error
            self._failure = f"the stream failed: {message}"
        self._answer.usage = data.get("usage") or self._answer.usage

    def result(self) -> Answer:
        """Return the answer. Raises RequestFailed for a refusal or an answer cut short."""
        if not self.complete and not self._done:
            raise RequestFailed("the server closed the connection before the end of its answer")
        status = self._parser.get_status_code()
        if status != 200:
            raise RequestFailed(f"HTTP {status}: {_error_message(self._rest)}")
        return self._answer


def _error_message(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
