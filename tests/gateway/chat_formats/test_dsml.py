"""The calls of V3.2 and V4: what each text means, and that no cut changes it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.gateway.chat_formats.transcripts import (
    Call,
    Parsed,
    assemble,
    cut_at,
    feed,
    new_parser,
    parse,
)
from tests.gateway.conftest import TEMPLATE
from tests.gateway.real_gateway import real_gateway
from tests.gateway.serving import TestClient
from tests.gateway.wire import chat
from whalepod.server.gateway.chat_formats.dsml import DEEPSEEK_V4, DEEPSEEK_V32
from whalepod.server.gateway.chat_formats.interface import ChatFormat

formats = pytest.mark.parametrize("chat_format", [DEEPSEEK_V32, DEEPSEEK_V4], ids=lambda f: f.name)
BLOCK = "function_calls"


def parameter(name: str, value: str, string: str = "true") -> str:
    head = f'<｜DSML｜parameter name="{name}" string="{string}">'
    return f"{head}{value}</｜DSML｜parameter>\n"


def invoke(name: str, *parameters: str) -> str:
    return f'<｜DSML｜invoke name="{name}">\n{"".join(parameters)}</｜DSML｜invoke>\n'


def block(*calls: str, name: str = BLOCK) -> str:
    return f"<｜DSML｜{name}>\n{''.join(calls)}</｜DSML｜{name}>"


VALUES = st.text(max_size=8) | st.sampled_from(
    ['a "quote"\n', "上海🙂", "</x>", "<｜DSML｜", "1 < 2"]
)
TEXTS = st.lists(
    st.sampled_from(['<｜DSML｜invoke name="', 'w">', "<｜DSML｜tool_calls>", "</｜DSML｜invoke>"])
    | st.sampled_from(
        ['<｜DSML｜parameter name="', 'k" string="true">', "</｜DSML｜parameter>", "\n"]
    )
    | st.sampled_from(
        ["</think>", "</｜DSML｜function_calls>", '{"a": 1}', "<", '"', ">", "｜DSML｜"]
    )
    | st.text(max_size=3),
    max_size=16,
).map("".join)


@formats
@given(text=TEXTS, start=st.sampled_from(["reasoning", "content", "open"]), data=st.data())
def test_no_cut_changes_what_a_text_means(
    chat_format: ChatFormat, text: str, start: Any, data: st.DataObject
) -> None:
    complete, parallel = data.draw(st.booleans()), data.draw(st.booleans())

    def parsed(pieces: list[str]) -> Parsed:
        parser = new_parser(chat_format, start, parallel=parallel)
        return parse(parser, pieces, complete=complete)

    whole = parsed([text])
    assert parsed(list(text)) == whole
    positions = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    assert parsed(cut_at(text, positions)) == whole


@formats
@pytest.mark.parametrize("name", ["function_calls", "tool_calls"])
@given(city=VALUES, number=st.integers() | st.lists(st.text(max_size=3)))
def test_parameters_become_one_object(
    chat_format: ChatFormat, name: str, city: str, number: Any
) -> None:
    written = json.dumps(number, ensure_ascii=False)
    call = invoke("w", parameter("city", city), parameter("n", written, "false"))
    text = "why</think>Hi\n\n" + block(call, invoke("now"), name=name) + "\n"

    for pieces in ([text], list(text)):
        parsed = parse(new_parser(chat_format, "reasoning"), pieces)
        first, second = parsed.calls
        assert (parsed.reasoning, parsed.content) == ("why", "Hi")
        assert json.loads(first.arguments) == {"city": city, "n": number}
        assert second == Call("call_1", "now", "{}", ended=True)


@formats
def test_a_text_streams_while_the_model_writes(chat_format: ChatFormat) -> None:
    parser = new_parser(chat_format)
    head, tail = block(invoke("w", parameter("city", "A|B"))).split("|B")

    assert assemble(feed(parser, head)).calls[0].arguments == '{"city": "A'
    assert "|B" not in tail


@formats
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (block('<｜DSML｜invoke name="w"/>\n'), "{}"),
        (block('<｜DSML｜invoke name="w">\n{"city": "A"}\n</｜DSML｜invoke>\n'), '{"city": "A"}'),
        (block(invoke("w", parameter("n", "not json", "false"))), '{"n": "not json"}'),
        (invoke("w", parameter("city", "A")), '{"city": "A"}'),
        (block(invoke("w", parameter("city", "A"))).split("</｜DSML｜inv")[0], '{"city": "A"}'),
        (
            block(invoke("w", '<｜DSML｜parameter name="city">A</｜DSML｜parameter>')),
            '{"city": "A"}',
        ),
    ],
)
def test_sloppy_calls_are_understood(chat_format: ChatFormat, text: str, arguments: str) -> None:
    for pieces in ([text], list(text)):
        (call,) = parse(new_parser(chat_format), pieces).calls
        assert call == Call("call_0", "w", arguments, ended=True)


@formats
@pytest.mark.parametrize(
    "text",
    ["The block\n\n<｜DSML｜tool_calls> opens", 'Say <｜DSML｜invoke name="a b"> there', "<｜DSML"],
)
def test_N034_prose_after_a_lone_marker_stays(chat_format: ChatFormat, text: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(new_parser(chat_format), pieces) == Parsed("", text)


@formats
def test_N034_prose_after_the_calls_stays(chat_format: ChatFormat) -> None:
    text = "a\n\n" + block(invoke("now")) + " b"

    parsed = parse(new_parser(chat_format), list(text))

    assert parsed == Parsed("", "a b", [Call("call_0", "now", "{}", ended=True)])


@formats
def test_a_call_that_a_limit_cuts_stays_as_it_is(chat_format: ChatFormat) -> None:
    text = block(invoke("w", parameter("city", "Amsterdam"))).split("dam")[0]

    parsed = parse(new_parser(chat_format), [text], complete=False)

    assert parsed == Parsed("", "", [Call("call_0", "w", '{"city": "Amster')])


@formats
def test_without_tools_their_markup_is_text(chat_format: ChatFormat) -> None:
    text = block(invoke("w"))

    assert parse(new_parser(chat_format, tools=None), list(text)).content == text


CALL = """<｜DSML｜function_calls>
<｜DSML｜invoke name="{{ c.function.name }}">
{% for k, v in c.function.arguments.items() -%}
<｜DSML｜parameter name="{{ k }}" string="false">{{ v | tojson }}</｜DSML｜parameter>
{% endfor %}</｜DSML｜invoke>
</｜DSML｜function_calls>"""


@pytest.fixture(scope="module")
def v32(nano: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A random model whose template writes such calls."""
    folder = tmp_path_factory.mktemp("dsml") / "nano"
    shutil.copytree(nano, folder)
    start, end = TEMPLATE.index("{{ '<｜tool▁call▁begin"), TEMPLATE.index("{% endfor -%}\n{{ eos")
    (folder / "chat_template.jinja").write_text(TEMPLATE[:start] + CALL + TEMPLATE[end:])
    with real_gateway(folder) as gateway, gateway.client() as client:
        yield client


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("strict", [False, True])
def test_a_forced_call_fulfils_its_schema(v32: TestClient, seed: int, strict: bool) -> None:
    properties = {
        "city": {"enum": ["Oslo", "上海"], "type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "exact": {"type": "boolean"},
    }
    parameters = {"type": "object", "properties": properties, "required": ["city", "days"]}
    parameters |= {"additionalProperties": False}
    function = {"name": "w", "parameters": parameters, "strict": strict}
    tools = [{"type": "function", "function": function}]
    fields = {"tools": tools, "temperature": 1, "seed": seed, "max_tokens": 300}
    named = {"type": "function", "function": {"name": "w"}}

    choice = chat(v32, **fields, tool_choice=named)["choices"][0]

    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Oslo", "上海")
    assert 1 <= arguments["days"] <= 9
    assert set(arguments) <= set(properties)


def test_a_text_that_no_grammar_can_hold_to_its_schema_is_a_400(v32: TestClient) -> None:
    parameters = {"type": "object", "properties": {"q": {"type": "string", "pattern": "^a$"}}}
    function = {"name": "w", "parameters": parameters, "strict": True}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    messages = [{"role": "user", "content": "hi"}]

    answer = v32.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, **body})

    assert answer.status_code == 400
    assert "pattern" in answer.json()["error"]["message"]
