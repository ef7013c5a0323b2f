"""Tools to ask for, with the call that serves the request, its result and the answer."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.draws import Draw, draw
from whalepod.tools.tiny.data.phrasing import opened, patterns
from whalepod.tools.tiny.data.sample import Call, Patterns, Split
from whalepod.tools.tiny.data.tables import load
from whalepod.tools.tiny.data.tool_family import FAMILIES, MORE_FAMILIES, Family


def _extras(name: str) -> dict[str, tuple[str, Draw, str]]:
    return {key: (form, draw(values), kind) for key, (form, values, kind) in _TABLE[name].items()}


_TABLE = load("composed_tools")
_VERBS, _NOUNS, _MORE_VERBS, _MORE_NOUNS, _COINED_WORDS, _OPAQUE_ARGUMENTS = (
    _TABLE[name].split()
    for name in ("verbs", "nouns", "more_verbs", "more_nouns", "coined", "opaque_arguments")
)
_COMPOSED = patterns(_TABLE["requests"])
_EXTRAS, _MORE_EXTRAS = _extras("extras"), _extras("more_extras")


def tool_words() -> list[str]:
    """List the words that tools of the training split are named with."""
    found = [*_VERBS, *(f"_{noun}" for noun in _NOUNS), *_NOUNS, *_EXTRAS]
    for family in FAMILIES.values():
        spelled = [*family.names.train]
        for argument in family.arguments.values():
            spelled += argument.names.train
        found += [part for name in spelled for part in re.findall("_?[a-z]+", name)]
    return sorted(set(found))


_HELD_OUT_NAMES = {
    name for family in FAMILIES.values() for name in (*family.names.dev, *family.names.test)
}
_COINED_SHARE = 0.85
_OPAQUE_SHARE = 0.25
_MORE_SHARE = 0.25
_NEAR_SHARE = 0.3


@dataclass(frozen=True, slots=True)
class Task:
    """A tool in OpenAI's format, with a request, the call that serves it and what comes back."""

    key: str
    tool: dict[str, Any]
    request: str
    call: Call
    result: dict[str, Any]
    answer: str
    spelled: dict[str, str]
    """The tool's arguments: what each is for, and how the tool names it."""


def _families(split: Split) -> dict[str, Family]:
    return FAMILIES | MORE_FAMILIES if split == "train" else FAMILIES


def _tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
            },
        },
    }


def _spell_name(rng: random.Random, split: Split, key: str) -> str:
    """Name a family's tool. Half of the training names are coined, so that they must be read."""
    if split != "train" or rng.random() > _COINED_SHARE:
        return _families(split)[key].names.pick(rng, split)
    if rng.random() < _OPAQUE_SHARE:
        return opaque_name(rng)
    while True:
        coined = rng.choice([*_COINED_WORDS, *(words.made_up_word(rng) for _ in _COINED_WORDS)])
        parts = [key, coined]
        rng.shuffle(parts)
        if (name := "_".join(parts)) not in _HELD_OUT_NAMES:
            return name


def opaque_name(rng: random.Random) -> str:
    """Invent a name that says nothing of what the tool does: its description must be read."""
    while True:
        word, noun = words.made_up_word(rng), rng.choice((*_MORE_NOUNS, *_COINED_WORDS))
        verb = rng.choice((*_COINED_WORDS, *_VERBS, *_MORE_VERBS))
        coined = rng.choice(
            (word, f"{word}_{noun}", f"{verb}_{word}", f"{verb}_{noun}", f"{verb}_{noun}",
             f"{verb}_{rng.randint(1, 99)}", f"tool_{rng.randint(1, 99)}")
        )  # fmt: skip
        if coined not in _HELD_OUT_NAMES:
            return coined


def _opaque_argument(rng: random.Random) -> str:
    return rng.choice((words.made_up_word(rng), rng.choice(_OPAQUE_ARGUMENTS)))


def _spell_argument(rng: random.Random, split: Split, field: str, names: Patterns) -> str:
    """Name an argument; some training names are coined, too."""
    if split == "train" and rng.random() < 0.3:
        return rng.choice((f"{field}_{rng.choice(_COINED_WORDS)}", _opaque_argument(rng)))
    return names.pick(rng, split)


def _spell_arguments(rng: random.Random, split: Split, family: Family) -> dict[str, str]:
    while True:
        spelled = {
            field: _spell_argument(rng, split, field, item.names)
            for field, item in family.arguments.items()
        }
        if len(set(spelled.values())) == len(spelled):
            return spelled


def _draw_slots(rng: random.Random, split: Split, family: Family) -> dict[str, Any]:
    """Draw a value for each argument, no value twice."""
    while True:
        slots = {field: argument.draw(rng, split) for field, argument in family.arguments.items()}
        if len(set(map(str, slots.values()))) == len(slots):
            return slots


def _family_task(rng: random.Random, split: Split, key: str) -> Task:
    family = _families(split)[key]
    slots = _draw_slots(rng, split, family)
    spelled = _spell_arguments(rng, split, family)
    properties: dict[str, Any] = {}
    for field_name, argument in family.arguments.items():
        properties[spelled[field_name]] = {"type": argument.json_type}
        if rng.random() < 0.15:
            properties[spelled[field_name]]["description"] = f"The {field_name}"
    name = _spell_name(rng, split, key)
    result = family.result(rng, slots)
    return Task(
        key=key,
        tool=_tool(name, rng.choice(family.descriptions), properties),
        request=opened(rng, split, family.requests, 0.2).format(**slots),
        call=(name, {spelled[field]: value for field, value in slots.items()}),
        result=result,
        answer=family.answer.format(**slots | result),
        spelled=spelled,
    )


def _held_out_pair(verb: str, noun: str) -> Split:
    index = (_VERBS.index(verb) * 5 + _NOUNS.index(noun) * 3) % 16
    return "test" if index in (2, 9) else "dev" if index == 5 else "train"


def _verb_and_noun(rng: random.Random, split: Split) -> tuple[str, str]:
    if split == "train" and rng.random() < 0.35:
        return rng.choice(_VERBS + _MORE_VERBS), rng.choice(_MORE_NOUNS)
    while True:
        verb, noun = rng.choice(_VERBS), rng.choice(_NOUNS)
        if _held_out_pair(verb, noun) == split:
            return verb, noun


def _composed_name(rng: random.Random, split: Split, verb: str, noun: str) -> str:
    if split != "train":
        return f"{verb}_{noun}"
    if rng.random() < _OPAQUE_SHARE / 2:
        return opaque_name(rng)
    coined = rng.choice((rng.choice(_COINED_WORDS), words.made_up_word(rng)))
    form: str = rng.choice(_TABLE["names"])
    return form.format(v=verb, n=noun, x=coined)


def _composed_task(rng: random.Random, split: Split, pair: tuple[str, str] | None = None) -> Task:
    """Make a tool that does one verb to one noun, so that tools are read and not memorised."""
    verb, noun = pair or _verb_and_noun(rng, split)
    extras = _EXTRAS | _MORE_EXTRAS if split == "train" else _EXTRAS
    keys = rng.sample(sorted(extras), rng.choice((0, 1, 1, 2)))
    text, values = _composed_request(rng, split, verb, noun, keys)
    name = _composed_name(rng, split, verb, noun)
    spelled = _composed_arguments(rng, split, keys)
    properties = {spelled[key]: {"type": extras[key][2]} for key in keys}
    status = rng.choice(("ok", "done", "ready", "started"))
    return Task(
        key=f"{verb}_{noun}",
        tool=_tool(name, f"{verb.capitalize()} the {noun}", properties),
        request=text,
        call=(name, {spelled[key]: values[key] for key in keys}),
        result={"status": status},
        answer=f"Done. The status of the {noun} is {status}.",
        spelled=spelled,
    )


def _composed_request(
    rng: random.Random, split: Split, verb: str, noun: str, keys: Iterable[str]
) -> tuple[str, dict[str, Any]]:
    """Ask for one verb to one noun with a value for each of `keys`."""
    extras = _EXTRAS | _MORE_EXTRAS
    values = {key: extras[key][1](rng, split) for key in keys}
    tail = "".join(" " + extras[key][0].format(v=values[key]) for key in values)
    form = opened(rng, split, _COMPOSED, 0.2)
    return form.format(V=verb.capitalize(), v=verb, n=noun, t=tail), values


def _composed_arguments(rng: random.Random, split: Split, keys: list[str]) -> dict[str, str]:
    """Name arguments; some of training's have another word beside or instead of their own."""
    spelled = {key: key for key in keys}
    for key in keys if split == "train" else ():
        draw = rng.random()
        if draw < 0.15:
            spelled[key] = f"{key}_{rng.choice(_COINED_WORDS)}"
        elif draw < 0.35 and (coined := _opaque_argument(rng)) not in spelled.values():
            spelled[key] = coined
    return spelled


def asked_again(rng: random.Random, split: Split, item: Task) -> Task:
    """Ask for the tool of `item` in other words and with other values."""
    family = _families(split).get(item.key)
    if family is None or family.arguments.keys() != item.spelled.keys():
        verb, noun = item.key.split("_")
        request, values = _composed_request(rng, split, verb, noun, item.spelled)
        call = item.call[0], {item.spelled[key]: value for key, value in values.items()}
        return replace(item, request=request, call=call)
    slots = _draw_slots(rng, split, family)
    result = family.result(rng, slots)
    return replace(
        item,
        request=opened(rng, split, family.requests, 0.2).format(**slots),
        call=(item.call[0], {item.spelled[field]: value for field, value in slots.items()}),
        result=result,
        answer=family.answer.format(**slots | result),
    )


def _near_task(rng: random.Random, composed: Task) -> Task:
    """Make a training tool with the verb or the noun of another one: they must be told apart."""
    verb, noun = composed.key.split("_")
    if rng.random() < 0.5:
        return _composed_task(rng, "train", (rng.choice(_MORE_VERBS), noun))
    return _composed_task(rng, "train", (verb, rng.choice(_MORE_NOUNS)))


def task(rng: random.Random, split: Split) -> Task:
    if rng.random() < 0.35:
        return _composed_task(rng, split)
    more = split == "train" and rng.random() < _MORE_SHARE
    return _family_task(rng, split, rng.choice(sorted(MORE_FAMILIES if more else FAMILIES)))


def _other_task(rng: random.Random, split: Split, wanted: list[Task]) -> Task:
    """Draw a tool to stand beside the wanted ones; in training, some are much like one of them."""
    composed = [item for item in wanted if item.key not in FAMILIES | MORE_FAMILIES]
    if split == "train" and composed and rng.random() < _NEAR_SHARE:
        return _near_task(rng, rng.choice(composed))
    return task(rng, split)


def tool_list(
    rng: random.Random, split: Split, wanted: list[Task], extra: int
) -> list[dict[str, Any]]:
    """List the wanted tools and `extra` others in any order, no name twice."""
    tools = {item.call[0]: item.tool for item in wanted}
    keys = {item.key for item in wanted}
    while extra > 0:
        other = _other_task(rng, split, wanted)
        if other.key not in keys and other.call[0] not in tools:
            tools[other.call[0]] = other.tool
            keys.add(other.key)
            extra -= 1
    listed = list(tools.values())
    rng.shuffle(listed)
    return listed


def distinct_tasks(rng: random.Random, split: Split, count: int) -> list[Task]:
    """Draw tasks whose tools can stand in one list."""
    found: list[Task] = []
    while len(found) < count:
        item = task(rng, split)
        if all(item.key != other.key and item.call[0] != other.call[0] for other in found):
            found.append(item)
    return found
