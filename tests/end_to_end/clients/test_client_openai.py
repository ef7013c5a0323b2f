"""docs/openai.md."""

from __future__ import annotations

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import HELLO, SUNNY


def test_the_openai_page_runs(reader: Reader) -> None:
    assert reader.run_python("openai") == [
        HELLO,
        HELLO,  # streamed
        "Person(name='Anna', age=31)",
        'get_weather {"city": "Paris"}',
        SUNNY,
        HELLO,  # a response
        "['function_call']",
    ]
