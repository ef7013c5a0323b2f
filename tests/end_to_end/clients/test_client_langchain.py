"""docs/langchain.md."""

from __future__ import annotations

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import HELLO, SUNNY


def test_the_langchain_page_runs(reader: Reader) -> None:
    assert reader.run_python("langchain") == [
        HELLO,
        HELLO,  # streamed
        "Person(name='Anna', age=31)",
        *["get_weather Paris", SUNNY],  # an agent over chat completions
        *["get_weather Paris", SUNNY],  # over Responses
    ]
