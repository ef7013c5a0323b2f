"""docs/instructor.md, with the older openai package that it needs, and forms that `tiny` fills."""

from __future__ import annotations

from pathlib import Path

from tests.end_to_end.clients.pages import Reader

PROGRAM = Path(__file__).parent / "programs" / "instructor_on_tiny.py"


def test_the_instructor_page_runs(reader: Reader) -> None:
    assert reader.run_python("instructor", "clients-instructor") == [
        "Person(name='Anna', age=31)",  # JSON schema
        "Person(name='Bob', age=27)",  # a forced call
    ]


def test_answers_of_tiny_keep_to_the_schema_at_the_first_try(reader: Reader) -> None:
    program = PROGRAM.read_text(encoding="utf-8")

    assert reader.run_program(program, "clients-instructor") == ["Boat"] * 3
