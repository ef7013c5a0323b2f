"""A tiny byte-level tokenizer with DeepSeek's special tokens, and the application around it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.real_gateway import real_gateway
from tests.gateway.serving import TestClient
from whalepod.models.synthetic import synthesize
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway.app import create_app
from whalepod.server.tokenizer import TextTokenizer

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
MARKERS = [
    *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
]
TEMPLATE = """{{ bos_token }}{% for m in messages -%}
{% if m.role == 'system' %}{{ m.content }}{% endif -%}
{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}{% endif -%}
{% if m.role == 'tool' %}{{ '<｜tool▁outputs▁begin｜>' + m.content }}{% endif -%}
{% if m.role == 'assistant' %}{{ '<｜Assistant｜>' + (m.content or '') -}}
{% for c in m.tool_calls or [] %}{{ '<｜tool▁call▁begin｜>' + c.function.name -}}
{{ '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor -%}
{{ eos_token }}{% endif -%}
{% if m.content == 'explode' %}{{ raise_exception('no explosions') }}{% endif -%}
{% endfor -%}
{% if tools %}[tools {{ tools | length }}]{% endif -%}
{% if add_generation_prompt %}<｜Assistant｜>{% endif -%}
{% if add_generation_prompt %}{{ '<think>' if thinking else '</think>' }}{% endif %}"""
CORPUS = [
    "The answer to the question is done. one two three, hello world, how are you?",
    "上海是一个城市。 naïve Münster 🙂 🎉 abc DEF GHI",
] * 4


def write_tokenizer(folder: Path, **config: object) -> Path:
    """Train and save the tokenizer; `config` goes into tokenizer_config.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([BOS, EOS, PAD])
    tokenizer.add_tokens([AddedToken(m, special=False, normalized=False) for m in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "LlamaTokenizerFast",
        "add_bos_token": True,
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": TEMPLATE,
        **config,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> TextTokenizer:
    return TextTokenizer.from_folder(tokenizer_folder)


@pytest.fixture
def engine(tokenizer: TextTokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def client(engine: FakeEngine, tokenizer: TextTokenizer) -> Iterator[TestClient]:
    config = GatewayConfig(served_model_name=("tiny",), allow_priority=True)
    with TestClient(create_app(config, engine, tokenizer)) as client:
        yield client


@pytest.fixture(scope="session")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random weights and V3.1's chat template."""
    folder = synthesize("v3-nano", tmp_path_factory.mktemp("real") / "nano")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def real_client(nano: Path) -> Iterator[TestClient]:
    """The application around a real engine with random weights and V3.1's way of answering."""
    with real_gateway(nano) as gateway, gateway.client() as client:
        yield client
