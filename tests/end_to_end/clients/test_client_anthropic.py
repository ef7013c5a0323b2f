"""docs/anthropic.md."""

from __future__ import annotations

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import HELLO, SUNNY


def test_the_anthropic_page_runs(reader: Reader) -> None:
    whole, num_tokens, *rest = reader.run_python("anthropic")

    assert whole == HELLO
    assert int(num_tokens) > 5
    assert rest == [HELLO, "get_weather {'city': 'Paris'}", SUNNY]
