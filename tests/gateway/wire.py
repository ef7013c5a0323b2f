"""Short ways to ask the gateway and to read its streams."""

from __future__ import annotations

from typing import Any

import orjson

from tests.gateway.serving import TestClient
from tests.scripts import scripted


def chat(client: TestClient, content: str = "hi", **fields: Any) -> dict[str, Any]:
    """Return the whole answer to one user message."""
    return post(client, "/v1/chat/completions", messages=[user(content)], **fields)


def complete(client: TestClient, prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return post(client, "/v1/completions", prompt=prompt, **fields)


def post(client: TestClient, path: str, **fields: Any) -> dict[str, Any]:
    response = client.post(path, json=scripted({"model": "tiny", **fields}))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def stream(client: TestClient, path: str, **fields: Any) -> list[Any]:
    """Return the parsed events of a stream, "[DONE]" as a string."""
    response = client.post(path, json=scripted({"model": "tiny", "stream": True, **fields}))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.content)


def stream_chat(client: TestClient, content: str = "hi", **fields: Any) -> list[Any]:
    return stream(client, "/v1/chat/completions", messages=[user(content)], **fields)


def parse_events(body: bytes) -> list[Any]:
    frames = [frame for frame in body.split(b"\n\n") if frame and not frame.startswith(b":")]
    assert all(frame.startswith(b"data: ") for frame in frames), frames
    payloads = [frame.removeprefix(b"data: ") for frame in frames]
    return [p.decode() if p == b"[DONE]" else orjson.loads(p) for p in payloads]


def named_events(body: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream whose frames also have names, which repeat their types."""
    events = []
    for frame in body.split(b"\n\n"):
        if frame and not frame.startswith(b":"):
            name, data = frame.split(b"\n")
            events.append(orjson.loads(data.removeprefix(b"data: ")))
            assert name.decode() == f"event: {events[-1]['type']}"
    return events


def choices_of(events: list[Any]) -> list[dict[str, Any]]:
    return [event["choices"][0] for event in events if event != "[DONE]" and event.get("choices")]


def text_of(events: list[Any], index: int = 0) -> str:
    deltas = [c["delta"] for c in choices_of(events) if c["index"] == index]
    return "".join(delta.get("content") or "" for delta in deltas)


def finish_reasons(events: list[Any]) -> list[str]:
    return [c["finish_reason"] for c in choices_of(events) if c["finish_reason"] is not None]


def error_of(response: Any, status: int) -> dict[str, Any]:
    """Return the error of an answer after checking its status and OpenAI's shape."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


def calls_of(events: list[Any], index: int = 0) -> list[tuple[str, str]]:
    """Return the names and arguments that a client assembles from the deltas of one choice."""
    calls: dict[int, list[str]] = {}
    for choice in choices_of(events):
        for delta in choice["delta"].get("tool_calls", []) if choice["index"] == index else []:
            function = delta["function"]
            if delta["index"] not in calls:  # the first delta of a call names it, for good
                assert delta["type"] == "function"
                assert delta["id"].startswith("call_")
                calls[delta["index"]] = [function["name"], ""]
            else:
                assert set(delta) == {"index", "function"}
                assert set(function) == {"arguments"}
            calls[delta["index"]][1] += function["arguments"]
    assert sorted(calls) == list(range(len(calls)))
    return [(name, arguments) for name, arguments in calls.values()]


def reasoning_of(events: list[Any], index: int = 0) -> str:
    deltas = [c["delta"] for c in choices_of(events) if c["index"] == index]
    assert all(d.get("reasoning") == d.get("reasoning_content") for d in deltas)
    return "".join(delta.get("reasoning") or "" for delta in deltas)
