"""The parsers by themselves: what each text means, and that no cut changes it."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.gateway.chat_formats.transcripts import (
    CITY,
    TOOLS,
    Call,
    Parsed,
    block,
    cut_at,
    feed,
    new_parser,
    parse,
    v3_call,
    v31_call,
)
from whalepod.server.gateway.chat_formats.deepseek import DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31
from whalepod.server.gateway.chat_formats.deepseek_parser import MARKERS
from whalepod.server.gateway.chat_formats.interface import ChatFormat, Start
from whalepod.server.gateway.content_blocks import BlockGrew

families = pytest.mark.parametrize(
    "family", [DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31], ids=lambda family: family.name
)
thinkers = pytest.mark.parametrize("family", [DEEPSEEK_R1, DEEPSEEK_V31], ids=lambda f: f.name)
forms = pytest.mark.parametrize("call", [v3_call, v31_call])

TEXTS = st.lists(
    st.sampled_from([*MARKERS, "function", "w", "now", "\n", "\n\n", "```", "json", "{", "}"])
    | st.sampled_from(['"city"', ": ", '"上海"', "<", "｜", "<｜tool", "hi ", "\\", '"', "[", "]"])
    | st.text(max_size=4),
    max_size=24,
).map("".join)
WELL_FORMED = st.builds(
    lambda reasoning, content, calls: reasoning + content + (block(*calls) if calls else ""),
    st.sampled_from(["", "why</think>", "<think>\nwhy\n</think>\n\n", "no end"]),
    st.sampled_from(["", "hello", "a <｜tool b", "text\n\n", "<b>"]),
    st.lists(
        st.builds(
            lambda form, name, value: form(name, json.dumps({"city": value}, ensure_ascii=False)),
            st.sampled_from([v3_call, v31_call]),
            st.sampled_from(["w", "function", "other"]),
            st.text(max_size=5) | st.sampled_from(['x 2>&1"', "``` }", "Münster", "上海\\"]),
        ),
        max_size=3,
    ),
)
STARTS = st.sampled_from(["reasoning", "content", "open"])


@families
@given(text=WELL_FORMED | TEXTS, start=STARTS, data=st.data())
def test_no_cut_changes_what_a_text_means(
    family: ChatFormat, text: str, start: Start, data: st.DataObject
) -> None:
    complete, parallel = data.draw(st.booleans()), data.draw(st.booleans())
    tools = data.draw(st.sampled_from([TOOLS, None]))

    def parsed(pieces: list[str]) -> Parsed:
        parser = new_parser(family, start, tools, parallel=parallel)
        return parse(parser, pieces, complete=complete)

    whole = parsed([text])
    assert parsed(list(text)) == whole
    positions = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parsed(cut_at(text, positions)) == whole


@families
@given(text=WELL_FORMED)
def test_no_single_cut_changes_what_a_text_means(family: ChatFormat, text: str) -> None:
    whole = parse(new_parser(family, "open"), [text])

    for position in range(len(text) + 1):
        assert parse(new_parser(family, "open"), cut_at(text, [position])) == whole


MARKER_BYTES = st.sampled_from(MARKERS).map(str.encode)
PIECES_OF_BYTES = st.lists(
    st.binary(max_size=40)
    | MARKER_BYTES
    | st.builds(lambda marker, size: marker[:size], MARKER_BYTES, st.integers(0, 20)),
    max_size=12,
)
SETS_OF_TOOLS = st.sampled_from([TOOLS, {}, None])


@families
@settings(max_examples=max(300, settings.default.max_examples))
@given(pieces=PIECES_OF_BYTES, start=STARTS, tools=SETS_OF_TOOLS, data=st.data())
def test_random_bytes_never_raise(
    family: ChatFormat, pieces: list[bytes], start: Start, tools: Any, data: st.DataObject
) -> None:
    """Whatever a model says, and wherever its tokens cut characters and markup."""
    complete, parallel = data.draw(st.booleans()), data.draw(st.booleans())
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts = [*(decoder.decode(piece) for piece in pieces), decoder.decode(b"", final=True)]

    cut, whole = (
        parse(new_parser(family, start, tools, parallel=parallel), texts, complete=complete)
        for texts in (texts, ["".join(texts)])
    )

    assert cut == whole


@families
@given(text=TEXTS)
def test_without_tools_their_markup_is_text(family: ChatFormat, text: str) -> None:
    assert parse(new_parser(family, tools=None), [text]).content == text


@families
@forms
@given(
    name=st.sampled_from(["w", "function", "unknown"]),
    value=st.text() | st.sampled_from(["x 2>&1", "```", "\n```", "</think>", "{}]"]),
)
def test_arguments_arrive_as_the_model_wrote_them(
    family: ChatFormat, call: Any, name: str, value: str
) -> None:
    arguments = json.dumps({"city": value}, ensure_ascii=False)

    parsed = parse(new_parser(family), list("Hello\n\n" + block(call(name, arguments)) + "bye"))

    assert parsed == Parsed("", "Hellobye", [Call("call_0", name, arguments, ended=True)])


@families
def test_v3_calls_are_separated_by_newlines(family: ChatFormat) -> None:
    calls = v3_call("w", '{"city":"A"}'), v3_call("w", '{"city":"B"}')

    parsed = parse(new_parser(family), [block(*calls, between="\n")])

    assert [c.arguments for c in parsed.calls] == ['{"city":"A"}', '{"city":"B"}']


@thinkers
@pytest.mark.parametrize("start", ["reasoning", "open"])
def test_reasoning_ends_at_its_closing_tag(family: ChatFormat, start: Start) -> None:
    text = "<think>because</think>answer" if start == "open" else "because</think>answer"

    assert parse(new_parser(family, start), list(text)) == Parsed("because", "answer")


@thinkers
def test_an_opening_tag_that_the_prompt_already_has_is_dropped(family: ChatFormat) -> None:
    text = "<think>because</think>answer"

    assert parse(new_parser(family, "reasoning"), [text]) == Parsed("because", "answer")


@thinkers
def test_text_without_a_closing_tag_is_all_reasoning(family: ChatFormat) -> None:
    text = "because\n\n</thin"

    assert parse(new_parser(family, "reasoning"), list(text)) == Parsed(text, "")


@thinkers
def test_an_open_start_without_the_tag_is_content(family: ChatFormat) -> None:
    assert parse(new_parser(family, "open"), list("  <thanks>")) == Parsed("", "  <thanks>")


def test_r1_newlines_around_its_tags_are_no_text() -> None:
    text = "<think>\n\nfirst\n\nsecond\n</think>\n\nanswer\n"

    parsed = parse(new_parser(DEEPSEEK_R1, "open"), list(text))

    assert parsed == Parsed("first\n\nsecond", "answer\n")


def test_v31_newlines_around_its_tags_are_text() -> None:
    parsed = parse(new_parser(DEEPSEEK_V31, "reasoning"), list("why\n</think>\nanswer"))

    assert parsed == Parsed("why\n", "\nanswer")


def test_v3_does_not_reason() -> None:
    text = "<think>a</think>b"

    assert parse(new_parser(DEEPSEEK_V3, "open"), list(text)) == Parsed("", text)


@thinkers
@forms
def test_a_tool_block_ends_the_reasoning(family: ChatFormat, call: Any) -> None:
    text = "I need the weather" + block(call("w", "{}")) + "</think>late"

    parsed = parse(new_parser(family, "reasoning"), list(text))

    assert parsed == Parsed("I need the weather", "late", [Call("call_0", "w", "{}", ended=True)])


@families
def test_text_is_delivered_up_to_what_may_be_markup(family: ChatFormat) -> None:
    parser = new_parser(family)

    sent = [parse_text(feed(parser, piece)) for piece in ("a <", "b ", "<｜tool", "▁x", "\n", "c")]

    assert sent == ["a ", "<b ", "", "<｜tool▁x", "", "\nc"]


def parse_text(events: Any) -> str:
    return "".join(event.text for event in events if isinstance(event, BlockGrew))


@families
@forms
def test_item_28_arguments_stream_while_the_model_writes(family: ChatFormat, call: Any) -> None:
    arguments = '{"city":"A long name of a city"}'
    parser = new_parser(family)

    events = [feed(parser, character) for character in block(call("w", arguments))]

    pieces = [e.text for step in events for e in step if isinstance(e, BlockGrew)]
    assert pieces == ['{"c', *arguments[3:]]  # up to here it may be a needless wrapper


@families
@forms
@pytest.mark.parametrize("complete", [True, False])
def test_a_cut_call_stays_as_it_is(family: ChatFormat, call: Any, complete: bool) -> None:
    text = block(call("w", '{"city":"A"}'))
    cut = text[: text.index("A") + 1]

    parsed = parse(new_parser(family), [cut], complete=complete)

    assert parsed == Parsed("", "", [Call("call_0", "w", '{"city":"A', ended=complete)])


@families
def test_a_call_whose_name_is_cut_is_none(family: ChatFormat) -> None:
    for text in ("w", "function<｜tool▁sep｜>w", "function<｜tool▁s"):
        parser = new_parser(family)
        parsed = parse(
            parser, ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + text], complete=False
        )
        assert parsed == Parsed()


@families
@pytest.mark.parametrize(
    "call",
    [
        v3_call("now", ""),
        v3_call("now", "{}"),
        v31_call("now", ""),
        v31_call("now", "null"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>",
    ],
)
def test_a_call_without_arguments_has_an_empty_object(family: ChatFormat, call: str) -> None:
    parsed = parse(new_parser(family), list("<｜tool▁calls▁begin｜>" + call))

    assert parsed.calls == [Call("call_0", "now", "{}", ended=True)]


@families
@pytest.mark.parametrize(
    "call",
    [
        'w<｜tool▁sep｜>```json\n{"city":"A"}\n```<｜tool▁call▁end｜>',
        'w<｜tool▁sep｜>```\n{"city":"A"}```\n<｜tool▁call▁end｜>',
        'w \n<｜tool▁sep｜> {"city":"A"} trailing<｜tool▁call▁end｜>',
        'function<｜tool▁sep｜>\nw\n{"city":"A"}<｜tool▁call▁end｜>',
        'function<｜tool▁sep｜>w{"city":"A"}<｜tool▁calls▁end｜>',
        'w<｜tool▁sep｜>{"city":"A"}<｜tool▁call▁begin｜>',
        'w<｜tool▁sep｜>{"city":"A"}',
    ],
)
def test_sloppy_calls_are_understood(family: ChatFormat, call: str) -> None:
    parsed = parse(new_parser(family), list("<｜tool▁call▁begin｜>" + call))

    assert parsed.calls == [Call("call_0", "w", '{"city":"A"}', ended=True)]


@families
def test_only_one_call_when_they_must_not_be_parallel(family: ChatFormat) -> None:
    text = block(v31_call("w", "{}"), v31_call("now", "{}"))

    assert len(parse(new_parser(family, parallel=False), list(text)).calls) == 1


@families
@pytest.mark.parametrize("key", ["arguments", "input"])
@pytest.mark.parametrize("value", ['{"city": "A", "n": 1.50}', '"{\\"city\\": \\"A\\"}"'])
def test_item_24_a_needless_wrapper_is_removed(family: ChatFormat, key: str, value: str) -> None:
    parsed = parse(new_parser(family), list(block(v31_call("w", f'{{ "{key}" : {value} }}'))))

    assert parsed.calls[0].arguments == (value if value[0] == "{" else json.loads(value))


@families
@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"properties": {"input": {"type": "object"}}}, '{"input": {"city": "A"}}'),
        ({"properties": {"a": {}}, "additionalProperties": True}, '{"input": {"city": "A"}}'),
        ({"$ref": "#/$defs/x"}, '{"input": {}}'),
        (None, '{"input": {}}'),
        (CITY, '{"input": {}, "city": "A"}'),
        (CITY, '{"input": "A"}'),
        (CITY, '{"input": 5}'),
        (CITY, '{"input": {}, "input": {}}'),
        (CITY, '{"inputs": {}}'),
        (CITY, '{"city": "A", "input": {}}'),
        (CITY, "{}"),
    ],
)
def test_item_24_what_may_be_meant_stays(
    family: ChatFormat, parameters: Any, arguments: str
) -> None:
    parser = new_parser(family, tools={"w": parameters})

    assert parse(parser, list(block(v31_call("w", arguments)))).calls[0].arguments == arguments


def test_tokens_of_the_closing_tag_belong_to_the_reasoning() -> None:
    parser = new_parser(DEEPSEEK_V31, "reasoning")
    counted = []
    for piece in ("a", "b", "</think>", "c"):
        counted.append(parser.in_reasoning)
        parser.feed(piece)

    assert counted == [True, True, True, False]


def test_long_garbage_is_no_name_and_costs_linear_time() -> None:
    parser = new_parser(DEEPSEEK_V31)
    text = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + "x" * 100_000 + "<｜tool▁sep｜>{}"

    parsed = parse(parser, [text, block(v31_call("w", "{}"))])

    assert [call.name for call in parsed.calls] == ["w"]
