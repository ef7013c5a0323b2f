from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from tests.gateway.conftest import EOS
from tests.gateway.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import (
    chat,
    choices_of,
    finish_reasons,
    post,
    stream,
    stream_chat,
    text_of,
    user,
)
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer


def content(answer: dict[str, object]) -> str:
    return str(answer["choices"][0]["message"]["content"])  # type: ignore[index]


def test_stream_and_whole_answer_say_the_same(client: TestClient) -> None:
    whole = chat(client)["choices"][0]
    events = stream_chat(client)

    assert text_of(events) == whole["message"]["content"]
    assert "naïve 上海 🙂 done" in text_of(events)
    assert finish_reasons(events) == [whole["finish_reason"]] == ["stop"]
    assert events[-1] == "[DONE]"


def test_a_chunk_is_what_clients_expect(client: TestClient) -> None:
    events = stream_chat(client)

    first = events[0]
    assert first["id"].startswith("chatcmpl-")
    assert first["object"] == "chat.completion.chunk"
    assert first["system_fingerprint"].startswith("fp_")
    assert len({event["id"] for event in events[:-1]}) == 1
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in c["delta"] for c in choices_of(events)[1:])


@given(text=st.text("ab上🙂SO", max_size=12), stop=st.text("ab上🙂SO", max_size=3), data=st.data())
def test_every_cut_streams_what_the_whole_answer_says(
    tokenizer: TextTokenizer, text: str, stop: str, data: st.DataObject
) -> None:
    """Steps may cut anywhere between tokens; text, counts and reasons stay the same."""
    ids = tokenizer.encode(text, adds_bos=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=4)))
    bounds = [0, *cuts, len(ids)]
    steps = [ids[a:b] for a, b in itertools.pairwise(bounds)]
    engine = FakeEngine(tokenizer)
    client = client_of(engine)
    fields = {"stop": stop or None, "return_token_ids": True}

    engine.script = lambda request, index: [*steps, [engine.eos]]
    events = stream_chat(client, **fields, stream_options={"include_usage": True})
    engine.script = lambda request, index: [[*ids, engine.eos]]
    whole = chat(client, **fields)

    choice = whole["choices"][0]
    assert text_of(events) == choice["message"]["content"] == text.split(stop or "\0")[0]
    assert finish_reasons(events) == [choice["finish_reason"]]
    assert events[-2]["usage"] == whole["usage"]
    streamed = [i for c in choices_of(events) for i in c.get("token_ids", [])]
    assert streamed == choice["token_ids"]
    assert len(streamed) == whole["usage"]["completion_tokens"]


def client_of(engine: FakeEngine) -> TestClient:
    config = GatewayConfig(served_model_name=("tiny",))
    return TestClient(create_app(config, engine, engine.tokenizer))


def test_b003_b005_exactly_one_finish_reason_and_null_before(client: TestClient) -> None:
    for fields in ({}, {"max_tokens": 2}, {"stop": "answer"}, {"test_steps": []}):
        reasons = [c["finish_reason"] for c in choices_of(stream_chat(client, **fields))]

        assert reasons[-1] in ("stop", "length")
        assert set(reasons[:-1]) <= {None}


def test_b009_tool_choice_none_without_tools_is_plain_text(client: TestClient) -> None:
    assert content(chat(client, tool_choice="none"))


def test_b029_an_assistant_turn_may_have_no_content(client: TestClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    turns = [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]

    assert post(client, "/v1/chat/completions", messages=turns)["choices"]


def test_b031_developer_is_the_system(client: TestClient, engine: FakeEngine) -> None:
    for role in ("developer", "system"):
        messages = [{"role": role, "content": "Be brief"}, user("hi")]
        post(client, "/v1/chat/completions", messages=messages)

    assert engine.submitted[0].prompt_token_ids == engine.submitted[1].prompt_token_ids
    assert "Be brief" in engine.tokenizer.decode(engine.submitted[0].prompt_token_ids)


def test_content_may_be_a_list_of_text_parts(client: TestClient, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    post(client, "/v1/chat/completions", messages=[user(parts)])

    assert "one\ntwo" in engine.tokenizer.decode(engine.submitted[0].prompt_token_ids)


@pytest.mark.parametrize("stream", [True, False])
def test_b051_nothing_of_a_stop_string_is_sent(client: TestClient, stream: bool) -> None:
    fields = {"stop": ["DEFGHIJ"], "test_steps": ["ABC", "DEF", "G", "HI", "J", "K"]}

    text = text_of(stream_chat(client, **fields)) if stream else content(chat(client, **fields))

    assert text == "ABC"


def test_b053_text_is_not_delayed_by_a_fixed_amount(client: TestClient) -> None:
    events = stream_chat(client, stop=["zzzz"], test_steps=["one ", "two ", "three"])

    deltas = [c["delta"].get("content") for c in choices_of(events)]
    assert deltas == ["", "one ", "two ", "three", None]


def test_b055_a_stop_inside_the_budget_wins(client: TestClient) -> None:
    choice = chat(client, stop=["S"], max_tokens=50, test_steps=["a b S d e f" * 20])["choices"][0]

    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "S")
    assert choice["message"]["content"] == "a b "


def test_b057_stop_strings_wait_for_min_tokens(client: TestClient) -> None:
    steps = ["a", "b", "c", "d", "e", "a", "f"]
    answer = chat(client, stop=["a"], min_tokens=5, max_tokens=8, test_steps=steps)

    assert content(answer) == "abcde"
    assert answer["usage"]["completion_tokens"] == 6


def test_b059_max_completion_tokens_is_a_limit(client: TestClient) -> None:
    answer = chat(client, max_completion_tokens=3, ignore_eos=True)

    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


def test_more_tokens_than_the_context_holds_are_clamped(client: TestClient) -> None:
    usage = chat(client, max_completion_tokens=13107, ignore_eos=True)["usage"]

    assert usage["total_tokens"] == MAX_MODEL_LEN


def test_b035_no_field_holds_the_text_of_the_end_token(client: TestClient) -> None:
    assert EOS not in content(chat(client, test_steps=["Good morning!"]))
    assert EOS not in content(chat(client, test_steps=["a", EOS], skip_special_tokens=False))


def test_b069_usage_comes_only_when_asked_for_and_last(client: TestClient) -> None:
    for options in ({}, {"stream_options": {}}, {"stream_options": {"include_usage": False}}):
        assert not any("usage" in event for event in stream_chat(client, **options)[:-1])

    events = stream_chat(client, stream_options={"include_usage": True})
    *before, last, done = events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    assert not any("usage" in event for event in before)


def test_b071_stream_and_whole_answer_count_the_same(client: TestClient) -> None:
    fields = {"temperature": 0, "max_tokens": 7}
    events = stream_chat(client, **fields, stream_options={"include_usage": True})

    assert events[-2]["usage"] == chat(client, **fields)["usage"]


def test_b073_cached_tokens_are_those_of_the_first_sequence(
    client: TestClient, engine: FakeEngine
) -> None:
    assert chat(client, n=4)["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    engine.num_cached_tokens = 64
    assert chat(client, n=4)["usage"]["prompt_tokens_details"] == {"cached_tokens": 64}


def test_usage_counts_guesses_of_all_answers(client: TestClient, engine: FakeEngine) -> None:
    engine.num_rejected_drafts = 2
    usage = chat(client, n=2, test_steps=["abcdef", "gh", "i"])["usage"]

    details = usage["completion_tokens_details"]
    num_steps = 4  # the last is the end token
    assert details["accepted_prediction_tokens"] == usage["completion_tokens"] - 2 * num_steps
    assert details["rejected_prediction_tokens"] == 2 * num_steps * 2


def test_guesses_behind_a_stop_string_are_not_accepted(
    client: TestClient, engine: FakeEngine
) -> None:
    engine.num_rejected_drafts = 1
    usage = chat(client, test_steps=["abcdef", "gh"], stop="c")["usage"]

    num_tokens = usage["completion_tokens"]
    details = usage["completion_tokens_details"]
    num_guessed = len(engine.tokenizer.encode("abcdef", adds_bos=False)) - 1
    assert details["accepted_prediction_tokens"] <= num_tokens <= num_guessed
    assert sum(details[f"{word}_prediction_tokens"] for word in ("accepted", "rejected")) == (
        num_guessed + 1
    )


def test_b075_choices_of_a_stream_have_their_own_index(client: TestClient) -> None:
    events = stream_chat(client, n=3)
    whole = chat(client, n=3)["choices"]

    assert [c["index"] for c in whole] == [0, 1, 2]
    for choice in whole:
        own = [c for c in choices_of(events) if c["index"] == choice["index"]]
        assert own[0]["delta"]["role"] == "assistant"
        assert text_of(events, choice["index"]) == choice["message"]["content"]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]
    assert len({c["message"]["content"] for c in whole}) == 3


def test_a_choice_that_hit_its_stop_is_silent_while_others_go_on(
    client: TestClient, engine: FakeEngine
) -> None:
    answer = chat(client, n=2, stop="answer 0")

    texts = [c["message"]["content"] for c in answer["choices"]]
    assert texts[0] == ""
    assert texts[1].startswith("answer 1 to ")
    assert engine.aborted == []
    assert engine.aborted_answers == [(engine.submitted[0].request_id, 0)]


def test_usage_counts_the_tokens_up_to_the_stop_string_of_each_choice(
    client: TestClient, engine: FakeEngine
) -> None:
    one, both = (chat(client, n=n, stop="answer 0", ignore_eos=True) for n in (1, 2))

    num_tokens = [answer["usage"]["completion_tokens"] for answer in (one, both)]
    assert num_tokens[1] - num_tokens[0] == engine.submitted[1].params.max_tokens
    assert num_tokens[0] < 20
    assert [c["finish_reason"] for c in both["choices"]] == ["stop", "length"]


def test_a_stop_string_aborts_the_rest_in_the_engine(
    client: TestClient, engine: FakeEngine
) -> None:
    chat(client, stop="to", ignore_eos=True)

    assert engine.aborted_answers == [(engine.submitted[0].request_id, 0)]
    assert not engine.running


def test_an_answer_that_the_engine_ended_is_not_aborted(
    client: TestClient, engine: FakeEngine
) -> None:
    chat(client, n=2)
    chat(client, n=2, stop="done", test_steps=["all done"], max_tokens=1)

    assert engine.aborted_answers == []


def test_b097_internal_ids_are_unique_and_the_clients_is_echoed(
    client: TestClient, engine: FakeEngine
) -> None:
    for _ in range(2):
        body = {"model": "tiny", "messages": [user("hi")]}
        response = client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "same"})
        assert response.headers["x-request-id"] == "same"

    assert len({submit.request_id for submit in engine.submitted}) == 2
    assert "same" not in {submit.request_id for submit in engine.submitted}


def test_parameters_reach_the_engine(client: TestClient, engine: FakeEngine) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "seed": 42,
        "min_tokens": 2,
        "num_speculative_tokens": 3,
    }
    chat(client, **fields, logit_bias={"5": -100}, priority=3, stop_token_ids=[7])

    (submit,) = engine.submitted
    assert {name: getattr(submit.params, name) for name in fields} == fields
    assert submit.params.logit_bias == {5: -100.0}
    assert (submit.priority, submit.cache_salt) == (3, "")
    assert submit.params.stop_token_ids == (7,)


def test_null_and_unknown_fields_are_ignored(client: TestClient) -> None:
    assert content(chat(client, temperature=None, stop=None, store=True, metadata={"a": 1}))


def test_thinking_reaches_the_template_by_any_name(client: TestClient, engine: FakeEngine) -> None:
    for fields in (
        {"thinking": True},
        {"enable_thinking": True},
        {"thinking": {"type": "enabled"}},
        {"chat_template_kwargs": {"thinking": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ):
        chat(client, **fields)

    tails = {engine.tokenizer.decode(s.prompt_token_ids)[-7:] for s in engine.submitted}
    assert tails == {"<think>"}


def test_token_ids_are_returned_on_request(client: TestClient, engine: FakeEngine) -> None:
    answer = chat(client, return_token_ids=True)
    events = stream_chat(client, return_token_ids=True)

    prompt = list(engine.submitted[0].prompt_token_ids)
    assert answer["prompt_token_ids"] == events[0]["prompt_token_ids"] == prompt
    ids = answer["choices"][0]["token_ids"]
    assert ids == [i for c in choices_of(events) for i in c.get("token_ids", [])]
    assert engine.tokenizer.decode(ids, skip_special_tokens=True) == content(answer)


@pytest.mark.parametrize("streams", [True, False])
def test_b077_b065_chat_logprobs_have_exact_bytes(
    client: TestClient, engine: FakeEngine, streams: bool
) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "test_steps": ["上海🧪", "x"]}
    if streams:
        found = [c["logprobs"] for c in choices_of(stream_chat(client, **fields))]
        entries = [entry for logprobs in found if logprobs for entry in logprobs["content"]]
    else:
        entries = chat(client, **fields)["choices"][0]["logprobs"]["content"]

    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data.decode() == "上海🧪x"
    assert all(entry["token"] and len(entry["top_logprobs"]) == 2 for entry in entries)
    assert all(isinstance(entry["logprob"], float) for entry in entries)


def test_logprobs_are_cut_with_the_tokens_at_a_stop(client: TestClient) -> None:
    answer = chat(client, logprobs=True, stop="S", test_steps=["ab", "S c d e"])

    assert answer["choices"][0]["message"]["content"] == "ab"
    tokens = [entry["token"] for entry in answer["choices"][0]["logprobs"]["content"]]
    assert tokens == ["a", "b"]
    assert answer["usage"]["completion_tokens"] == 3


def test_stream_of_several_prompts_keeps_each_index(client: TestClient) -> None:
    events = stream(client, "/v1/completions", prompt=["a", "bb"], n=2, max_tokens=100)
    whole = post(client, "/v1/completions", prompt=["a", "bb"], n=2, max_tokens=100)["choices"]

    for choice in whole:
        own = [c["text"] for c in choices_of(events) if c["index"] == choice["index"]]
        assert "".join(own) == choice["text"]
    assert [c["index"] for c in whole] == [0, 1, 2, 3]
