"""Reasoning, alone and before structured output: reports of users by the number of their item."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.chat_formats.transcripts import cut_between_tokens, smallest_pieces
from tests.gateway.conftest import EOS
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.real_gateway import OFF, real_gateway
from tests.gateway.serving import TestClient
from tests.gateway.wire import chat, error_of, reasoning_of, stream_chat, text_of, user
from whalepod.mtp.config import SpeculationConfig

OPENERS = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
DRAFTS = SpeculationConfig(speculation="fixed", num_speculative_tokens=4)
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "w", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def drafting(nano: Path) -> Iterator[TestClient]:
    with real_gateway(nano, speculation=DRAFTS) as gateway, gateway.client() as client:
        yield client


@pytest.fixture(scope="module")
def plain(nano: Path) -> Iterator[TestClient]:
    with real_gateway(nano, speculation=OFF) as gateway, gateway.client() as client:
        yield client


@pytest.fixture(scope="module")
def undecided(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A model whose template leaves it to the model whether to think."""
    folder = tmp_path_factory.mktemp("undecided") / "nano"
    shutil.copytree(nano, folder)
    template = (nano / "chat_template.jinja").read_text()
    assert "'<think>' if thinking" in template
    (folder / "chat_template.jinja").write_text(
        template.replace("'<think>' if thinking", "'' if thinking")
    )
    with real_gateway(folder, speculation=DRAFTS) as gateway, gateway.client() as client:
        yield client


def said(client: TestClient, **fields: Any) -> tuple[str, str, dict[str, Any]]:
    """Return reasoning, content and usage; stream and whole answer must agree."""
    fields = {"thinking": True, **fields}
    whole = chat(client, **fields)
    events = stream_chat(client, **fields, stream_options={"include_usage": True})
    message = whole["choices"][0]["message"]
    assert reasoning_of(events) == message.get("reasoning", "")
    assert text_of(events) == (message["content"] or "")
    counts = [usage["completion_tokens_details"] for usage in (whole["usage"], events[-2]["usage"])]
    assert counts[0]["reasoning_tokens"] == counts[1]["reasoning_tokens"]
    return message.get("reasoning", ""), message["content"] or "", whole["usage"]


def num_reasoning(usage: dict[str, Any]) -> int:
    return int(usage["completion_tokens_details"]["reasoning_tokens"])


def token(client: TestClient, text: str) -> str:
    return str(client.post("/tokenize", json={"prompt": text}).json()["tokens"][-1])


@pytest.mark.parametrize("skip_special_tokens", [None, False])
@pytest.mark.parametrize("text", ["Good morning!", "because</think>answer", "because</think>"])
def test_item_31_the_text_of_the_end_token_is_nowhere(
    real_client: TestClient, skip_special_tokens: bool | None, text: str
) -> None:
    fields = {"skip_special_tokens": skip_special_tokens}
    expected = [*text.split("</think>"), ""][:2]

    for steps in ([text + EOS], [text, EOS], [text + EOS + "more"], smallest_pieces(text)):
        assert [*said(real_client, **fields, test_steps=steps)[:2]] == expected


@pytest.mark.parametrize("opening", ["", "<think>", "\n<think>"])
def test_item_33_a_prompt_that_opened_the_reasoning_is_believed(
    client: TestClient, opening: str
) -> None:
    text = opening + "because</think>answer"
    for position in range(len(text) + 1):
        answer = said(client, test_steps=cut_between_tokens(text, [position]))
        assert answer[:2] == ("because", "answer")


@pytest.mark.parametrize("budget", [0, 6])
@pytest.mark.parametrize("fields", [
    {},
    {"structured_outputs": {"choice": ["yes", "no"]}},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
], ids=["text", "grammar", "call"])  # fmt: skip
def test_item_36_a_budget_holds_within_drafts(
    drafting: TestClient, budget: int, fields: dict[str, Any]
) -> None:
    """The bias makes a random model repeat itself: most of its guesses come true."""
    fields = {**fields, "logit_bias": {"9": 90, "10": 90}, "seed": 1, "max_tokens": 20}

    for named in (
        {"thinking_token_budget": budget},
        {"thinking": {"type": "enabled", "budget_tokens": budget}},
    ):
        usage = chat(drafting, **{"thinking": True, **fields, **named})["usage"]
        assert num_reasoning(usage) == budget + 1, "the closing tag is one more"
        assert usage["completion_tokens"] > budget + 1
        if not fields.get("tools"):
            assert said(drafting, **fields, **named)[1]


@pytest.mark.parametrize("opens", [True, False])
def test_item_36_a_budget_holds_when_the_model_opens_the_reasoning(
    undecided: TestClient, opens: bool
) -> None:
    """The prompt ends before `<think>`; the bias makes a random model write it, or never."""
    bias = {"9": 90, "10": 90} | ({token(undecided, "<think>"): 100} if opens else {})
    fields = {"logit_bias": bias, "seed": 1, "max_tokens": 20, "thinking_token_budget": 4}

    reasoning, content, usage = said(undecided, **fields)

    assert num_reasoning(usage) == (5 if opens else 0), "the closing tag is one more"
    assert bool(reasoning) == opens
    assert content
    assert usage["completion_tokens"] == 20


@pytest.mark.parametrize(
    ("fields", "ends"),
    [({}, ["</think>"]), ({"tools": [TOOL]}, ["</think>", *OPENERS])],
    ids=["text", "tools"],
)
def test_item_36_a_call_ends_a_reasoning_for_its_budget_too(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], ends: list[str]
) -> None:
    """As for the parser: else the closing tag would be forced into the arguments."""
    chat(client, thinking=True, thinking_token_budget=9, **fields)

    constraint = engine.submitted[0].params.constraint
    assert constraint is not None
    assert constraint.reasoning_ends[0] == int(token(client, "</think>"))
    assert set(constraint.reasoning_ends) == {int(token(client, end)) for end in ends}


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_a_grammar_behind_the_reasoning_is_not_missed_for_a_call_in_it(
    client: TestClient, engine: FakeEngine, choice: str
) -> None:
    """A call ends the reasoning without the tag that the grammar waits for."""
    grammar = {"structured_outputs": {"choice": ["yes", "no"]}}
    chat(client, thinking=True, tools=[TOOL], tool_choice=choice, **grammar)

    constraint = engine.submitted[0].params.constraint
    assert constraint is not None
    banned = {int(token(client, opener)) for opener in OPENERS} & set(constraint.banned_before)
    assert len(banned) == (len(OPENERS) if choice == "auto" else 0)


def test_item_36_a_budget_changes_no_shorter_reasoning(real_client: TestClient) -> None:
    assert said(real_client, thinking_token_budget=50, test_steps=["a</think>b"])[:2] == ("a", "b")
    assert said(real_client, thinking=False, thinking_token_budget=0, test_steps=["b"])[:2] == (
        "", "b"
    )  # fmt: skip


def test_item_36_a_budget_of_the_messages_api_reaches_the_engine(
    client: TestClient, engine: FakeEngine
) -> None:
    body = {"model": "tiny", "messages": [user("hi")], "max_tokens": 1100}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert client.post("/v1/messages", json={**body, "thinking": thinking}).status_code == 200

    constraint = engine.submitted[0].params.constraint
    assert constraint is not None
    assert constraint.max_reasoning_tokens == 1024


@pytest.mark.parametrize("n", [1, 2])
def test_item_36_a_budget_does_not_force_calls_that_are_strict(
    drafting: TestClient, n: int
) -> None:
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    fields = {"tools": [strict], "seed": 1, "max_tokens": 20, "logit_bias": {"9": 90, "10": 90}}

    answer = chat(drafting, **fields, n=n, thinking=True, thinking_token_budget=4)

    assert num_reasoning(answer["usage"]) == n * 5
    assert all("tool_calls" not in choice["message"] for choice in answer["choices"])
    assert all(choice["message"]["content"] for choice in answer["choices"])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "9"}, "thinking_token_budget"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": True}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1.5}}, "thinking.budget_tokens"),
    ],
)
def test_item_36_a_budget_that_is_no_number_of_tokens_is_refused(
    client: TestClient, engine: FakeEngine, fields: dict[str, Any], param: str
) -> None:
    body = {"model": "tiny", "messages": [user("hi")], **fields}

    assert error_of(client.post("/v1/chat/completions", json=body), 400)["param"] == param
    assert engine.submitted == []


@pytest.mark.parametrize("text", ["abcd", "ab</think>cd", "ab</think>"])
def test_item_37_what_follows_the_end_in_its_step_is_not_counted(
    real_client: TestClient, text: str
) -> None:
    """All tokens are one step, as with speculation; the answer ends in the middle of it."""
    usages = [
        said(real_client, test_steps=steps)[2] for steps in ([text + EOS + "xyz" * 9], [text])
    ]

    assert usages[0]["completion_tokens"] == usages[1]["completion_tokens"]
    assert num_reasoning(usages[0]) == num_reasoning(usages[1])
    assert num_reasoning(usages[0]) < usages[0]["completion_tokens"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"structured_outputs": {"regex": "[ab]{4}"}}, "[ab]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]{2}/'}}, "x[0-9]{2}"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [1]}}}},
            "1",
        ),
    ],
)
def test_item_38_a_grammar_leaves_the_reasoning_alone(
    real_client: TestClient, fields: dict[str, Any], pattern: str, seed: int
) -> None:
    fields = {**fields, "seed": seed, "max_tokens": 60, "thinking_token_budget": 9}

    reasoning, content, _ = said(real_client, **fields)

    assert reasoning
    assert not re.fullmatch(pattern, reasoning)
    assert re.fullmatch(pattern, content)


@pytest.mark.parametrize("thinking", [False, True])
def test_item_41_a_grammar_holds_at_every_draft(
    drafting: TestClient, plain: TestClient, thinking: bool
) -> None:
    """The prompt holds the answer, so drafts are found there and cross every boundary."""
    value = {"city": "abcdefgh", "code": "abcdefgh abcdefgh"}
    schema = {"type": "object", "properties": {k: {"const": v} for k, v in value.items()}}
    schema |= {"required": list(value), "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"schema": schema}}
    fields = {"response_format": response_format, "thinking": thinking, "temperature": 0}
    fields |= {"thinking_token_budget": 5, "max_tokens": 120}
    prompt = json.dumps(value) * 2

    answers = [chat(client, prompt, **fields) for client in (drafting, plain)]

    details = answers[0]["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] > 0
    choices = [answer["choices"][0] for answer in answers]
    assert choices[0] == choices[1]
    assert json.loads(choices[0]["message"]["content"]) == value
    assert choices[0]["finish_reason"] == "stop"
