"""docs/openai-agents.md, and an agent whose model is `tiny` itself."""

from __future__ import annotations

import json
from pathlib import Path

from tests.end_to_end.clients.pages import Reader
from tests.end_to_end.clients.turns import HELLO, SUNNY

PROGRAM = Path(__file__).parent / "programs" / "openai_agents_on_tiny.py"


def test_the_openai_agents_page_runs(reader: Reader) -> None:
    assert reader.run_python("openai-agents") == [
        *["get_weather Paris", SUNNY],  # over Responses
        *["get_weather Paris", SUNNY],  # over chat completions
        HELLO,  # streamed
    ]


def test_an_openai_agent_ends_a_loop_that_tiny_leads(reader: Reader) -> None:
    (line,) = reader.run_program(PROGRAM.read_text(encoding="utf-8"))
    run = json.loads(line)

    assert run["answer"]
    assert run["called"]
    assert run["asked"] == run["called"]
    assert run["failures"] == []
