"""`whalepod.Engine` and the composition root on a random v3-nano: the real model end to end."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import whalepod
from whalepod.models.synthetic import synthesize
from whalepod.scheduler.journal import replay
from whalepod.scheduler.limits import RequestRejected
from whalepod.scheduler.params import Constraint, SamplingParams
from whalepod.server.engine.grammar_queue import MAX_COMPILING
from whalepod.server.engine.local import Engine, Generation
from whalepod.server.engine.replay import Difference, replay_with_model
from whalepod.server.engine.scripted import new_encoder
from whalepod.server.errors import StartupError
from whalepod.server.messages import Abort, Submit
from whalepod.server.tokenizer import TextTokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
SAMPLED = replace(GREEDY, temperature=0.8, top_p=0.9, seed=3, frequency_penalty=0.2)
PROMPTS = [[(7 * i + j) % 500 for j in range(length)] for i, length in enumerate((3, 70, 130))]
ROOT = Path(whalepod.__file__).parent
OPTIONS: dict[str, Any] = {
    "dtype": "fp32", "batch_invariant": True, "max_model_len": 256,
    "max_num_seqs": 8, "num_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(synthesize("v3-nano", tmp_path_factory.mktemp("engine") / "nano"))


@pytest.fixture(scope="module")
def engine(nano: str) -> Iterator[Engine]:
    with Engine(nano, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(nano: str) -> list[list[Generation]]:
    """Each prompt by itself, computed once, without a cache."""
    with Engine(nano, **OPTIONS, enable_prefix_caching=False) as engine:
        return [[engine.generate([p], params)[0] for p in PROMPTS] for params in (GREEDY, SAMPLED)]


def bits(generations: list[Generation]) -> list[tuple[Any, ...]]:
    return [(g.token_ids, g.logprobs) for g in generations]


def test_more_prompts_than_grammars_may_be_waited_for_are_answered(engine: Engine) -> None:
    rule = Constraint(kind="regex", grammar="[a-z]{3}")

    answers = engine.generate(
        [[5]] * (MAX_COMPILING + 9), SamplingParams(max_tokens=1, constraint=rule)
    )

    assert {answer.finish_reason for answer in answers} == {"length"}


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_num_batched_tokens": 8}, {"max_num_batched_tokens": 50}, {"max_num_seqs": 1}],
)
def test_ids_and_logprobs_are_bit_equal_in_any_company(
    nano: str, alone: list[list[Generation]], changes: dict[str, int]
) -> None:
    with Engine(nano, **OPTIONS | changes) as engine:
        for params, expected in zip((GREEDY, SAMPLED), alone, strict=True):
            assert bits(engine.generate(PROMPTS, params)) == bits(expected)
            again = engine.generate(PROMPTS, params)
            assert bits(again) == bits(expected)
            assert again[2].num_cached_tokens >= 128


def test_preemption_changes_no_bit(nano: str, alone: list[list[Generation]]) -> None:
    with Engine(nano, **OPTIONS) as engine:
        block_bytes = 64 * engine._core.info.kv_bytes_per_token
    with Engine(nano, **OPTIONS, kv_cache_memory_bytes=5 * block_bytes) as engine:
        longer = replace(SAMPLED, max_tokens=100)
        together = engine.generate([PROMPTS[0], PROMPTS[1], PROMPTS[0][::-1]], longer)
        assert engine._core.stats.num_preemptions > 0
        assert engine._core.stats.num_blocks == 5
    assert together[1].token_ids[:12] == alone[1][1].token_ids
    assert together[1].logprobs[:12] == alone[1][1].logprobs


def test_text_in_text_out(engine: Engine) -> None:
    (answer,) = engine.generate("The quick brown fox", GREEDY)

    assert answer.finish_reason == "length"
    assert len(answer.token_ids) == 12
    assert isinstance(answer.text, str)


def test_one_refusal_refuses_all_and_leaves_nothing_behind(engine: Engine) -> None:
    with pytest.raises(RequestRejected, match="256"):
        engine.generate([PROMPTS[0], [1] * 300], GREEDY)

    assert not engine._core.has_work
    engine._core.check()


def test_more_prompts_than_the_queue_holds_are_fed_in_turn(nano: str) -> None:
    with Engine(nano, **OPTIONS | {"max_num_seqs": 2}, max_num_queued_reqs=3) as engine:
        answers = engine.generate([PROMPTS[0]] * 9, replace(GREEDY, max_tokens=2))

    assert len({answer.token_ids for answer in answers}) == 1


@pytest.fixture(scope="module")
def journal(nano: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("journal") / "journal"
    with Engine(nano, **OPTIONS, record=str(path)) as engine:
        engine.generate([*PROMPTS, PROMPTS[2]], SAMPLED)
        engine.generate(PROMPTS, replace(GREEDY, prompt_logprobs=1))
        core = engine._core
        core.receive(
            [Submit(request_id="r", prompt_token_ids=(1, 2), params=SAMPLED, num_sequences=3)]
        )
        for _ in range(4):
            core.step()
        core.receive([Abort(request_id="r", index=1)])
        while core.has_work:
            core.step()
    return path


def test_a_record_is_private_and_replays_without_a_model(journal: Path) -> None:
    assert journal.stat().st_mode & 0o777 == 0o600
    with journal.open("rb") as file:
        assert replay(file) is None


def test_a_record_is_whole_when_its_process_fails(nano: str, tmp_path: Path) -> None:
    """Objects in cycles that are frozen, as a server's engine is, are never finalised."""
    path = tmp_path / "journal"
    code = f"""
import gc
from whalepod import Engine, SamplingParams
engine = Engine({nano!r}, **{OPTIONS!r}, record={str(path)!r})
engine.cycle = engine
gc.freeze()
engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, seed=1))
raise SystemExit(1)
"""

    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / ".src").returncode == 1

    with path.open("rb") as file:
        assert replay(file) is None
    assert path.stat().st_size > 500


def test_a_record_replays_with_the_model_to_the_bit(journal: Path, nano: str) -> None:
    with journal.open("rb") as file, Engine(nano, **OPTIONS) as engine:
        assert replay_with_model(file, engine._core.runner) is None
        assert engine._core.runner.num_sequences == 0


def test_a_replay_with_another_model_names_the_first_step_that_differs(
    journal: Path, nano: str
) -> None:
    with (
        journal.open("rb") as file,
        Engine(nano, **OPTIONS, load_format="dummy", seed=99) as engine,
    ):
        difference = replay_with_model(file, engine._core.runner)

    assert isinstance(difference, Difference)
    assert difference.step == 1
    assert difference.recorded.token_ids != difference.computed.token_ids


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_model_len": 10**6}, "max_position_embeddings"),
        ({"kv_cache_memory_bytes": 100}, "one block"),
        ({"record": "/nowhere/journal"}, "cannot record to"),
    ],
)
def test_what_cannot_start_is_one_sentence(nano: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError, match=says):
        Engine(nano, **OPTIONS | options)


def test_ends_that_are_no_tokens_are_one_sentence(tmp_path: Path) -> None:
    folder = synthesize("v3-nano", tmp_path / "nano", with_weights=False)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, "</s>"]}')
    with pytest.raises(StartupError, match=r"eos_token_id must be integers, got .*</s>"):
        Engine(str(folder), **OPTIONS, load_format="dummy")


def test_N018_all_files_that_name_ends_of_sequence_count(tmp_path: Path) -> None:
    folder = synthesize("v3-nano", tmp_path / "nano", with_weights=False)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    names = json.loads((folder / "tokenizer_config.json").read_text())
    names["eos_token"] = tokens[-1]["content"]
    (folder / "tokenizer_config.json").write_text(json.dumps(names))

    with Engine(str(folder), **OPTIONS, load_format="dummy") as engine:
        ends = engine._core.info.eos_token_ids

    assert ends == tuple(sorted({1, 7, tokens[-1]["id"]}))


def test_a_model_that_is_nowhere_is_one_sentence() -> None:
    with pytest.raises(StartupError, match="no model"):
        Engine("no such model")


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match="colour"):
        Engine("tiny", colour="blue")


def test_params_must_match_the_prompts(engine: Engine) -> None:
    with pytest.raises(ValueError, match="2 prompts"):
        engine.generate(["a", "b"], [GREEDY])


def test_hooks_encode_markers_whole_and_lone_bytes(nano: str) -> None:
    tokenizer = TextTokenizer.from_folder(Path(nano))
    encode = new_encoder(tokenizer.transformers.backend_tokenizer)
    added = json.loads((Path(nano) / "tokenizer.json").read_text())["added_tokens"][0]
    marker = added["content"]

    assert list(encode(marker)) == [added["id"]]
    assert len(encode(marker[:-1])) > 1
    halves = [*encode("a\udcf0\udc9f"), *encode("\udc98\udc80b")]
    assert tokenizer.decode(halves) == "a\N{GRINNING FACE}b"
    with pytest.raises(ValueError, match="no byte"):
        encode("\ud800")
