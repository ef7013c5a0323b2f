"""The generator of the embedded model's text: seeded, and its held-out part really held out."""

import hashlib
import importlib
import itertools
import pkgutil
import random
import re

import pytest

import whalepod.tools.tiny.data
from whalepod.tools.tiny.data import markup, mixture, words
from whalepod.tools.tiny.data.arithmetic import borrow_steps, column_steps
from whalepod.tools.tiny.data.passages import opaque_form
from whalepod.tools.tiny.data.phrasing import opened, varied
from whalepod.tools.tiny.data.plain import PLAIN
from whalepod.tools.tiny.data.relations import RELATIONS
from whalepod.tools.tiny.data.sample import Patterns, Sample, spoken
from whalepod.tools.tiny.data.tool_tasks import FAMILIES, opaque_name
from whalepod.tools.tiny.evaluate import Answer, calls_right_tool, is_right


def training_samples(count: int, seed: int = 0) -> list[Sample]:
    return list(itertools.islice(mixture.samples(seed, "train"), count))


def module_patterns() -> list[Patterns]:
    found: list[Patterns] = []
    for module_info in pkgutil.iter_modules(whalepod.tools.tiny.data.__path__):
        module = importlib.import_module(f"whalepod.tools.tiny.data.{module_info.name}")
        found += [value for value in vars(module).values() if isinstance(value, Patterns)]
    found += [item for relation in RELATIONS.values() for item in (relation.told, relation.asked)]
    return found + [family.requests for family in FAMILIES.values()]


def test_the_same_seed_gives_the_same_samples() -> None:
    assert training_samples(50, seed=3) == training_samples(50, seed=3)
    assert training_samples(50, seed=3) != training_samples(50, seed=4)
    assert mixture.held_out() == mixture.held_out()


def test_there_are_500_held_out_prompts() -> None:
    assert len(mixture.held_out("test")) == 500


def test_no_pattern_is_in_two_splits() -> None:
    patterns = module_patterns()

    assert len(patterns) > 40
    for item in patterns:
        held_out = [form.lower() for form in (*item.dev, *item.test)]
        assert len(set(held_out)) == len(held_out), held_out
        assert not {form.lower() for form in item.train}.intersection(held_out)


def test_no_widened_training_pattern_holds_a_held_out_one() -> None:
    widened = [item for item in module_patterns() if item.weights]

    assert sum(len(item.train) for item in widened) > 5_000
    for item in widened:
        held_out = [spoken(form) for form in (*item.dev, *item.test)]
        assert not [form for form in item.train if any(other in spoken(form) for other in held_out)]


def test_words_put_around_a_pattern_never_make_a_held_out_one() -> None:
    patterns = varied(
        ["what> the sum of {a} and {b}"], dev=(), test=("Hi! Do you know the sum of {a} and {b}?",)
    )
    rng = random.Random(0)
    forms = {opened(rng, "train", patterns, share=1.0) for _ in range(3_000)}

    assert len(forms) > 1_000
    assert not [form for form in forms if "hi do you know the sum" in spoken(form)]


def test_sentences_with_a_verb_that_says_nothing_are_never_held_out_ones() -> None:
    rng = random.Random(0)
    assert all(relation.opaque for relation in RELATIONS.values())
    for name in RELATIONS:
        told = RELATIONS[name].told
        held_out = [spoken(form) for form in (*told.dev, *told.test)]
        forms = {opaque_form(rng, name) for _ in range(500)}

        assert len(forms) > 400
        assert all("{n}" in form and "{v}" in form for form in forms)
        assert not [form for form in forms if any(other in spoken(form) for other in held_out)]


def test_plain_passages_never_hold_a_held_out_pattern() -> None:
    def bare(form: str) -> str:
        return re.sub(r"\{\w+\}", "{}", spoken(form))

    patterns = [form for item in RELATIONS.values() for form in (item.told, item.asked)]
    held_out = {bare(form) for item in patterns for form in (*item.dev, *item.test)}
    plain = [form for item in PLAIN for form in (*item.told, *(asked for asked, _ in item.asked))]

    assert len(plain) > 50
    assert not [form for form in plain if any(other in bare(form) for other in held_out)]


def test_tool_names_that_say_nothing_are_never_held_out_ones() -> None:
    held_out = {name for item in FAMILIES.values() for name in (*item.names.dev, *item.names.test)}
    names = {opaque_name(random.Random(seed)) for seed in range(2_000)}

    assert len(names) > 1_500
    assert not names & held_out


def test_the_held_out_prompts_are_those_of_earlier_figures() -> None:
    digest = hashlib.sha256()
    for sample in mixture.held_out("test"):
        digest.update(repr((sample.messages, sample.tools, sample.answer)).encode())

    assert digest.hexdigest()[:16] == "102f9d6550d7778b"


def test_first_impressions_are_held_out_too() -> None:
    asked = {str(sample.messages[-1]["content"]) for sample in mixture.first_impressions()}
    seen = {
        str(mixture.MAKERS[kind](random.Random(seed), "train").messages[-1]["content"])
        for kind in ("calculation", "think_calculation", "outside", "known", "product")
        for seed in range(1_500)
    }

    one_digit = re.compile(r"(?<![\d.])\d(?!\d)\D+\d(?!\d)")  # all are learnt, none held out
    assert len(seen) > 3_000
    assert not [text for text in asked & seen if not one_digit.search(text)]


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (347, 58, "347 - 58. Ones: 17 - 8 = 9, borrow 1. Tens: 14 - 5 = 9, less 1 makes 8, borrow "
                  "1. Hundreds: 3 - 0 = 3, less 1 makes 2. So 347 - 58 = 289."),
        (7, 12, "7 - 12. 12 is larger. Ones: 12 - 7 = 5, borrow 1. Tens: 1 - 0 = 1, less 1 makes "
                "0. So 12 - 7 = 5 and 7 - 12 = -5."),
    ],
)  # fmt: skip
def test_subtraction_is_shown_place_by_place(a: int, b: int, text: str) -> None:
    assert borrow_steps(a, b) == text


def test_steps_of_any_calculation_are_true() -> None:
    rng = random.Random(0)
    for _ in range(3_000):
        a, b = rng.randint(0, 999), rng.randint(0, 999)
        for left, operation, right, result in re.findall(
            r"(\d+) ([+-]) (\d+) = (-?\d+)", f"{column_steps(a, b)} {borrow_steps(a, b)}"
        ):
            assert int(result) == int(left) + int(right) * (1 if operation == "+" else -1)


def test_no_tool_is_named_where_none_is_declared() -> None:
    samples = [mixture.MAKERS["missing"](random.Random(seed), "train") for seed in range(500)]
    alone = [sample for sample in samples if not sample.tools]

    assert len(alone) > 20
    assert not [sample for sample in alone if "tool" in sample.answer]


def test_names_blended_for_training_are_not_held_out_ones() -> None:
    rng = random.Random(0)
    names = {words.name(rng, "train") for _ in range(5_000)}

    assert len(names) > 1_500
    assert not names & {*words.NAMES["dev"], *words.NAMES["test"]}


def test_no_name_or_city_is_in_two_splits() -> None:
    for lists in (words.NAMES, words.CITIES):
        everything = [word for split in lists.values() for word in split]
        assert len(set(everything)) == len(everything)


def test_held_out_prompts_do_not_occur_in_training_text() -> None:
    seen = {str(sample.messages[-1]["content"]) for sample in training_samples(2_500)}
    asked = {
        sample.messages[-1]["content"] for sample in mixture.held_out() if sample.kind != "result"
    }

    assert not asked & seen


def test_sums_in_training_never_use_a_held_out_pair_of_numbers() -> None:
    rng = random.Random(0)
    numbers = [
        tuple(map(int, re.findall(r"\d+", mixture.MAKERS["think_sum"](rng, "train").answer)[:2]))
        for _ in range(2_000)
    ]

    assert {words.number_split(*pair) for pair in numbers} == {"train"}
    assert words.number_split(12, 93) == words.number_split(93, 12)
    share = sum(words.number_split(a, b) == "test" for a in range(10, 100) for b in range(10, 100))
    assert 0.07 < share / 8_100 < 0.13


@pytest.mark.parametrize("kind", sorted(mixture.MAKERS))
def test_the_wanted_answer_is_scored_as_right(kind: str) -> None:
    rng = random.Random(1)
    for split in ("train", "dev", "test"):
        for _ in range(40):
            sample = mixture.MAKERS[kind](rng, split)  # type: ignore[arg-type]
            assert is_right(sample, Answer(sample.answer, ended=True)), sample


def test_wanted_calls_fit_the_schema_of_a_listed_tool() -> None:
    calls = 0
    for sample in training_samples(1_500):
        schemas = {
            tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools
        }
        assert len(schemas) == len(sample.tools)
        for name, arguments in markup.read_calls(sample.answer):
            assert sorted(arguments) == sorted(schemas[name]["required"])
            calls += 1
    assert calls > 200


def test_wrong_answers_are_scored_as_wrong() -> None:
    rng = random.Random(2)
    total = mixture.MAKERS["sum"](rng, "test")
    call = mixture.MAKERS["call"](rng, "test")

    assert not is_right(total, Answer("It is 1000.", ended=True))
    assert not is_right(total, Answer(call.answer, ended=True))
    assert not is_right(call, Answer("I have no tool for that.", ended=True))
    assert not is_right(call, Answer(call.answer.replace("{", "["), ended=True))


def test_a_call_with_other_values_is_valid_and_not_right() -> None:
    rng = random.Random(3)
    sample = next(
        sample
        for sample in iter(lambda: mixture.MAKERS["call"](rng, "test"), None)
        if any(isinstance(value, str) for value in sample.expected.calls[0][1].values())
    )
    name, arguments = sample.expected.calls[0]
    other = {key: "x" if isinstance(value, str) else value for key, value in arguments.items()}

    def answer(*calls: tuple[str, dict[str, object]]) -> Answer:
        return Answer(markup.write_calls(calls), ended=True)

    assert calls_right_tool(sample, answer((name, other)))
    assert not is_right(sample, answer((name, other)))
    assert not calls_right_tool(sample, answer((name, other | {"extra": 1})))
    assert not calls_right_tool(sample, answer((name, dict.fromkeys(arguments))))
    assert not calls_right_tool(sample, answer(("unknown", arguments)))
    assert not calls_right_tool(sample, Answer("I have no tool for that.", ended=True))


def test_calls_are_read_back_as_written() -> None:
    calls = [("a", {"x": 1, "y": "ü"}), ("b", {})]

    assert markup.read_calls(markup.write_calls(calls)) == calls
    with pytest.raises(ValueError, match="must be a JSON object"):
        markup.read_calls(markup.write_calls([("a", {})]).replace("{}", "[]"))
