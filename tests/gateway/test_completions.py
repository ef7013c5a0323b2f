from __future__ import annotations

from tests.gateway.conftest import BOS
from tests.gateway.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.gateway.serving import TestClient
from tests.gateway.wire import choices_of, complete, post, stream


def test_prompts_of_every_form(client: TestClient, engine: FakeEngine) -> None:
    ids = engine.tokenizer.encode("one", adds_bos=False)
    for prompt in ("one", ["one", "two"], ids, [ids, ids]):
        answer = complete(client, prompt, max_tokens=100)
        assert answer["object"] == "text_completion"
        assert answer["id"].startswith("cmpl-")
        assert all(choice["finish_reason"] == "stop" for choice in answer["choices"])

    prompts = [submit.prompt_token_ids for submit in engine.submitted]
    assert len(prompts) == 6
    assert prompts[0] == (*engine.tokenizer.encode(""), *ids)
    assert prompts[3] == tuple(ids)  # token ids are taken as they are


def test_the_default_length_is_openais(client: TestClient) -> None:
    assert complete(client, ignore_eos=True)["usage"]["completion_tokens"] == 16


def test_stream_and_whole_answer_say_the_same(client: TestClient) -> None:
    events = stream(client, "/v1/completions", prompt="hi", max_tokens=100, logprobs=1)
    whole = complete(client, "hi", max_tokens=100, logprobs=1)["choices"][0]

    chunks = choices_of(events)
    assert "".join(c["text"] for c in chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        streamed = [x for c in chunks if c["logprobs"] for x in c["logprobs"][name]]
        assert streamed == whole["logprobs"][name]


def test_b063_echo_scores_a_prompt_without_generating(client: TestClient) -> None:
    answer = complete(client, "abc 上海", echo=True, max_tokens=0, logprobs=1)

    choice = answer["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abc 上海"
    assert answer["usage"]["completion_tokens"] == 0
    assert logprobs["tokens"][0] == BOS
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert len({len(values) for values in logprobs.values()}) == 1
    assert len(logprobs["tokens"]) == answer["usage"]["prompt_tokens"]


def test_offsets_point_at_the_tokens_text(client: TestClient) -> None:
    choice = complete(client, "hi", echo=True, logprobs=0, max_tokens=20)["choices"][0]

    logprobs = choice["logprobs"]
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset in zip(logprobs["tokens"], offsets, strict=True):
        if not token.startswith(("bytes:", "<｜")):
            assert choice["text"][offset : offset + len(token)] == token


def test_echo_comes_first_in_a_stream(client: TestClient) -> None:
    events = stream(client, "/v1/completions", prompt="abc", echo=True, max_tokens=3)

    assert choices_of(events)[0]["text"] == "abc"


def test_a_stream_says_at_once_that_an_answer_has_begun(client: TestClient) -> None:
    """Later tokens without text, here possible starts of the stop string, are not mentioned."""
    steps = ["x", "x", "y"]
    events = stream(
        client, "/v1/completions", prompt="a", stop="xxz", test_steps=steps, max_tokens=9
    )

    texts = [choice["text"] for choice in choices_of(events)]
    assert texts[:2] == ["", "xxy"]


def test_every_choice_echoes_its_own_prompt(client: TestClient) -> None:
    choices = complete(client, ["aa", "bb"], n=2, echo=True, logprobs=1, max_tokens=2)["choices"]

    assert [c["text"][:2] for c in choices] == ["aa", "aa", "bb", "bb"]
    assert all(len(c["logprobs"]["tokens"]) > 2 for c in choices)


def test_a_prompt_may_fill_the_whole_context_when_nothing_is_generated(client: TestClient) -> None:
    answer = complete(client, [1] * MAX_MODEL_LEN, echo=True, max_tokens=0, logprobs=1)

    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN


def test_prompt_and_answer_ids_are_returned_on_request(
    client: TestClient, engine: FakeEngine
) -> None:
    fields = {"prompt": ["a", "bb"], "n": 2, "return_token_ids": True, "echo": True}
    choices = post(client, "/v1/completions", **fields)["choices"]
    events = stream(client, "/v1/completions", **fields)

    prompts = [list(submit.prompt_token_ids) for submit in engine.submitted[:2]]
    assert [c["prompt_token_ids"] for c in choices] == [p for p in prompts for _ in range(2)]
    for choice in choices:
        chunks = [c for c in choices_of(events) if c["index"] == choice["index"]]
        assert chunks[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [i for c in chunks for i in c.get("token_ids", [])] == choice["token_ids"]
        assert len(choice["token_ids"]) == 16


def test_usage_counts_each_prompt_once(client: TestClient) -> None:
    one = complete(client, "abc", max_tokens=4)["usage"]
    many = complete(client, ["abc", "abc"], n=3, max_tokens=4)["usage"]

    assert many["prompt_tokens"] == 2 * one["prompt_tokens"]
    assert many["completion_tokens"] == 6 * one["completion_tokens"]


def test_stop_string_over_a_token_border_cuts_text_tokens_and_logprobs_together(
    client: TestClient,
) -> None:
    answer = complete(
        client,
        stop="xyz",
        logprobs=1,
        test_steps=["abx", "y", "z1", "2"],
        return_token_ids=True,
        max_tokens=50,
    )

    choice = answer["choices"][0]
    assert choice["text"] == "ab"
    count = answer["usage"]["completion_tokens"]
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == count


def test_a_stop_token_is_no_text(client: TestClient, engine: FakeEngine) -> None:
    # the engine ends a sequence at a stop token and names it
    (stop,) = engine.tokenizer.encode("z", adds_bos=False)
    for include, text in ((False, "ab"), (True, "abz")):
        choice = complete(
            client,
            stop_token_ids=[stop],
            test_steps=["ab", "z", "cd"],
            include_stop_str_in_output=include,
        )["choices"][0]

        assert (choice["text"], choice["stop_reason"]) == (text, stop)
