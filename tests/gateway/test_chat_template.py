"""The template that is read without a tokenizer is the one that the tokenizer has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.gateway.conftest import write_tokenizer
from whalepod.server.chat_template import read_chat_template
from whalepod.server.errors import StartupError
from whalepod.server.tokenizer import TextTokenizer


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"chat_template": "{{ one }}"},
        {
            "chat_template": [
                {"name": "tool_use", "template": "{{ tools }}"},
                {"name": "default", "template": "{{ two }}"},
            ]
        },
    ],
)
@pytest.mark.parametrize("has_file", [False, True])
def test_it_is_the_tokenizers(tmp_path: Path, config: dict[str, object], has_file: bool) -> None:
    folder = write_tokenizer(tmp_path, **config)
    if has_file:
        (folder / "chat_template.jinja").write_text("{{ file }}")

    found = read_chat_template(folder)

    template = TextTokenizer.from_folder(folder).template
    assert found is not None
    assert template is not None
    assert found.text == template.text


def test_an_override_wins_and_must_exist(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path)
    mine = tmp_path / "mine.jinja"
    mine.write_text("mine")

    found = read_chat_template(folder, mine)
    assert found is not None
    assert found.text == "mine"
    with pytest.raises(StartupError, match="cannot be read"):
        read_chat_template(folder, tmp_path / "absent")


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(StartupError, match="cannot be read"):
        read_chat_template(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({}))
    assert read_chat_template(tmp_path) is None


@pytest.mark.parametrize(
    "config", [[], {"chat_template": [1]}, {"chat_template": [{"name": "default"}]}]
)
def test_what_no_tokenizer_writes_is_named(tmp_path: Path, config: object) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"tokenizer_config\.json is not what tokenizers write"):
        read_chat_template(tmp_path)
