"""chat, complete and ps against a server that speaks just enough OpenAI."""

from __future__ import annotations

import io
import json
import socket
import sys

import pytest

from tests.tools.fake_openai_server import FakeServer
from whalepod.tools import cli
from whalepod.tools.client import Client, ClientError, events_of
from whalepod.tools.ps import parse_metrics
from whalepod.tools.terminal import ChatConfig, Conversation, Sampling, ServerAddress


@pytest.fixture
def dead_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_complete_streams_the_answer_to_stdout(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["complete", "once upon", "--url", fake_server.url, "--max-tokens", "4"]
    assert cli.main([*arguments, "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "t0 t1 t2 t3 \n"
    assert fake_server.bodies == [
        {
            "model": "fake",
            "prompt": "once upon",
            "max_tokens": 4,
            "temperature": 0.0,
            "stream": True,
        }
    ]


def test_chat_keeps_the_history_until_it_is_cleared(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n/clear\n/what\nthree\n/exit\nfour\n"))
    assert cli.main(["chat", "--url", fake_server.url, "--system", "be brief"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "t0 t1 t2 \n" * 3
    assert "unknown command '/what'" in captured.err
    sent = [[(m["role"], m["content"]) for m in body["messages"]] for body in fake_server.bodies]
    system, answer = ("system", "be brief"), ("assistant", "t0 t1 t2 ")
    assert sent == [
        [system, ("user", "one")],
        [system, ("user", "one"), answer, ("user", "two")],
        [system, ("user", "three")],
    ]


def test_leaving_an_answer_closes_its_stream_and_keeps_what_came(fake_server: FakeServer) -> None:
    fake_server.step_s = 0.02
    config = ChatConfig(
        server=ServerAddress(url=fake_server.url), sampling=Sampling(max_tokens=10_000)
    )
    with Client(fake_server.url, None) as client:
        conversation = Conversation(client, "fake", config)
        answer = conversation.ask("hello")
        assert next(answer) == "t0 "
        answer.close()  # type: ignore[attr-defined]
    assert fake_server.left_early.wait(timeout=10)
    assert conversation.messages[-1] == {"role": "assistant", "content": "t0 "}


def test_a_question_without_an_answer_is_forgotten(fake_server: FakeServer) -> None:
    fake_server.fail_after = 0
    config = ChatConfig(server=ServerAddress(url=fake_server.url), sampling=Sampling())
    with Client(fake_server.url, None) as client:
        conversation = Conversation(client, "fake", config)
        with pytest.raises(ClientError, match=r"the engine is lost \(HTTP 503\)"):
            list(conversation.ask("hello"))
    assert conversation.messages == []


@pytest.mark.parametrize("command", [["chat"], ["complete", "x"], ["bench", "serve"]])
def test_without_a_server_the_sentence_says_how_to_start_one(
    command: list[str], dead_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command, "--url", dead_url]) == 1
    assert capsys.readouterr().err == (
        f"whalepod: no server answers at {dead_url}; start one with `whalepod serve` or pass "
        "--url\n"
    )


def test_a_key_comes_from_the_environment_and_its_absence_is_explained(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_server.api_key = "secret"
    assert cli.main(["complete", "x", "--url", fake_server.url]) == 1
    assert "wrong key (HTTP 401; pass --api-key)" in capsys.readouterr().err
    monkeypatch.setenv("WHALEPOD_API_KEY", "secret")
    assert cli.main(["complete", "x", "--url", fake_server.url]) == 0


def test_ps_lists_state_and_load_of_each_server(
    fake_server: FakeServer, dead_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["ps", fake_server.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "url": fake_server.url,
            "state": "ready",
            "models": ["fake"],
            "num_running": 2,
            "num_waiting": 1,
            "kv_cache_used_percent": 25.0,
            "prefix_hit_percent": 25.0,
            "generation_tokens": 1234,
        }
    ]
    assert cli.main(["ps", fake_server.url, dead_url]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:3] == [fake_server.url, "fake", "2"]
    assert "down: no server answers" in lines[2]


def test_ps_says_why_a_server_is_not_ready(
    fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.ready = False
    assert cli.main(["ps", fake_server.url]) == 1
    assert 'not ready: {"reason": "loading"}' in capsys.readouterr().out


@pytest.mark.parametrize("command", [["ps"], ["complete", "x", "--url"]])
def test_what_is_no_model_server_is_named_in_one_sentence(
    command: list[str], fake_server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_server.models = ["a page", "of somebody else"]
    assert cli.main([*command, fake_server.url]) == 1
    captured = capsys.readouterr()
    assert "/v1/models is no list of models" in captured.out + captured.err


def test_an_address_that_is_none_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["complete", "x", "--url", "http://[::1"]) == 1
    assert "http://[::1" in capsys.readouterr().err
    assert cli.main(["ps", "http://[::1"]) == 1
    assert "down: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('data: {"error": "it broke"}', "it broke"),
        ('data: {"error": {"message": "it broke"}}', "it broke"),
        ("data: <html>", "what is no event: <html>"),
        ("data: [1]", r"what is no event: \[1\]"),
    ],
)
def test_a_broken_event_of_a_stream_is_named(line: str, says: str) -> None:
    with pytest.raises(ClientError, match=says):
        list(events_of(iter([": ping", "", line])))


def test_metrics_are_summed_over_labels_and_comments_skipped() -> None:
    text = '# HELP whalepod_a b\nwhalepod_a{x="1"} 1\nwhalepod_a{x="2"} 2.5\nother 9\nvllm:c 4\n'
    assert parse_metrics(text) == {"a": 3.5, "c": 4.0}
