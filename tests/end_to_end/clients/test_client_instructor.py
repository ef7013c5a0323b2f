"""docs/instructor.md, with the older openai package that it asks for."""

from __future__ import annotations

from tests.end_to_end.clients.pages import Reader


def test_the_instructor_page_runs(reader: Reader) -> None:
    assert reader.run_python("instructor", "clients-instructor") == [
        "Person(name='Anna', age=31)",  # JSON schema
        "Person(name='Bob', age=27)",  # a forced call
    ]
