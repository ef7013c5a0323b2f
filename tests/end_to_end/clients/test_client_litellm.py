"""docs/litellm.md."""

from __future__ import annotations

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import HELLO, SUNNY


def test_the_litellm_page_runs(reader: Reader) -> None:
    assert reader.run_python("litellm") == [HELLO, HELLO, 'get_weather {"city": "Paris"}', SUNNY]
