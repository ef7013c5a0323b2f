"""The chat template: golden strings in DeepSeek-V3.1's format."""

from pathlib import Path
from typing import Any

import pytest

from whalepod.tools.tiny.tokenizer import load_tokenizer

_TOKENIZER = load_tokenizer(Path(__file__).parents[2] / "models" / "tiny")
_BOS, _EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
_TOOL = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


def render(messages: list[dict[str, Any]], **arguments: Any) -> str:
    arguments = {"add_generation_prompt": True} | arguments
    text = _TOKENIZER.apply_chat_template(messages, tokenize=False, **arguments)
    assert isinstance(text, str)
    return text


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "get_time", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }


_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_time<｜tool▁sep｜>"
    '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


def test_thinking_is_off_unless_asked_for() -> None:
    messages = [{"role": "user", "content": "Hi"}]

    assert render(messages) == f"{_BOS}<｜User｜>Hi<｜Assistant｜></think>"
    assert render(messages, thinking=True) == f"{_BOS}<｜User｜>Hi<｜Assistant｜><think>"
    assert render(messages, enable_thinking=True) == render(messages, thinking=True)
    assert render(messages, thinking=False, enable_thinking=True) == render(messages)


def test_system_and_developer_messages_stand_in_front_joined_by_a_blank_line() -> None:
    messages = [
        {"role": "system", "content": "A"},
        {"role": "user", "content": "Hi"},
        {"role": "developer", "content": "B"},
    ]

    assert render(messages) == f"{_BOS}A\n\nB<｜User｜>Hi<｜Assistant｜></think>"


def test_tools_follow_the_system_part_one_json_line_each() -> None:
    messages = [{"role": "system", "content": "A"}, {"role": "user", "content": "Hi"}]
    line = '{"name": "get_time", "parameters": {"type": "object"}}'

    with_system = render(messages, tools=[_TOOL, _TOOL])
    without = render(messages[1:], tools=[_TOOL["function"]])

    assert with_system.startswith(f"{_BOS}A\n\n## Tools\n{line}\n{line}<｜User｜>Hi")
    assert without.startswith(f"{_BOS}## Tools\n{line}<｜User｜>Hi")


@pytest.mark.parametrize("arguments", ['{"city": "Oslo"}', {"city": "Oslo"}])
def test_call_arguments_are_written_once_whether_string_or_object(arguments: Any) -> None:
    messages = [{"role": "user", "content": "Time?"}, call(arguments)]

    text = render(messages, add_generation_prompt=False)

    assert text == f"{_BOS}<｜User｜>Time?<｜Assistant｜></think>{_CALL}{_EOS}"


@pytest.mark.parametrize("arguments", ["", None, {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    text = render([{"role": "user", "content": "Time?"}, call(arguments)])

    assert "<｜tool▁sep｜>{}<｜tool▁call▁end｜>" in text


def test_after_tool_results_the_model_goes_on_without_a_new_tag() -> None:
    result = {"role": "tool", "tool_call_id": "a", "content": "12:00"}
    messages = [{"role": "user", "content": "Time?"}, call({"city": "Oslo"}), result, result]
    output = "<｜tool▁output▁begin｜>12:00<｜tool▁output▁end｜>"
    prompt = f"{_BOS}<｜User｜>Time?<｜Assistant｜></think>{_CALL}{_EOS}{output}{output}"

    assert render(messages, thinking=True) == prompt
    answered = render([*messages, {"role": "assistant", "content": "Noon."}])
    assert answered == f"{prompt}Noon.{_EOS}<｜Assistant｜></think>"


def test_reasoning_of_earlier_turns_is_dropped() -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>Easy.</think>Hello"},
        {"role": "user", "content": "Bye"},
    ]

    expected = f"{_BOS}<｜User｜>Hi<｜Assistant｜></think>Hello{_EOS}<｜User｜>Bye"
    assert render(messages, add_generation_prompt=False) == expected


def test_content_may_be_a_list_of_text_parts() -> None:
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "Two"}, "Three"]

    assert "<｜User｜>One\nTwo\nThree<" in render([{"role": "user", "content": parts}])


def test_begin_of_sentence_stands_once() -> None:
    ids = _TOKENIZER.encode(render([{"role": "user", "content": "Hi"}]), add_special_tokens=True)

    assert ids.count(_TOKENIZER.bos_token_id) == 1
    assert ids[0] == _TOKENIZER.bos_token_id
