from __future__ import annotations

from starlette.testclient import TestClient

from tests.gateway.wire import chat, finish_reasons, stream_chat, text_of


def test_stream_and_whole_answer_say_the_same(client: TestClient) -> None:
    whole = chat(client)["choices"][0]
    events = stream_chat(client)

    assert text_of(events) == whole["message"]["content"]
    assert "naïve 上海 🙂 done" in text_of(events)
    assert finish_reasons(events) == [whole["finish_reason"]] == ["stop"]
    assert events[-1] == "[DONE]"
