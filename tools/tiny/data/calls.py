"""Tool calls: a list of tools, a request, the call, its result and the answer that uses it."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.draws import short_text
from whalepod.tools.tiny.data.markup import write_calls
from whalepod.tools.tiny.data.outside import CANNOT
from whalepod.tools.tiny.data.sample import (
    Call,
    Expected,
    Message,
    Sample,
    Split,
    assistant,
    has_word,
    sloppy,
    user,
)
from whalepod.tools.tiny.data.sums import sum_sample
from whalepod.tools.tiny.data.tables import load
from whalepod.tools.tiny.data.tool_family import FAMILIES
from whalepod.tools.tiny.data.tool_tasks import Task, task, tool_list

NO_TOOL = "I have no tool for that."
_ASKED_BY_CITY = ("weather", "time")


def num_others(rng: random.Random) -> int:
    return rng.choice((0, 0, 1, 1, 1, 2, 2, 3))


def call_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for something that one of the listed tools does; now and then for two at once."""
    return _call(rng, split, thinking=False)


def think_call_sample(rng: random.Random, split: Split) -> Sample:
    """The same in thinking mode: the steps name the tool."""
    return _call(rng, split, thinking=True)


def _call(rng: random.Random, split: Split, *, thinking: bool) -> Sample:
    first = task(rng, split)
    wanted, request = [first], first.request
    if rng.random() < 0.1 and first.key in _ASKED_BY_CITY:
        wanted, request = _two_cities(rng, split, first)
    calls = [item.call for item in wanted]
    answer = write_calls(calls)
    if thinking:
        answer = f"I call {first.call[0]}.</think>{answer}"
    return Sample(
        kind="think_call" if thinking else "call",
        messages=[user(sloppy(rng, request) if split == "train" else request)],
        tools=tool_list(rng, split, wanted[:1], num_others(rng)),
        answer=answer,
        thinking=thinking,
        expected=Expected(calls=tuple(calls)),
    )


def _two_cities(rng: random.Random, split: Split, first: Task) -> tuple[list[Task], str]:
    """Ask for two cities with one request: two calls of the same tool."""
    name, arguments = first.call
    argument, city = next(iter(arguments.items()))
    second = words.city(rng, split)
    while second == city:
        second = words.city(rng, split)
    other = replace(first, call=(name, {argument: second}))
    return [first, other], first.request.replace(city, f"{city} and {second}")


def result_sample(rng: random.Random, split: Split) -> Sample:
    """Give a call's result; the answer uses it."""
    item = task(rng, split)
    tools = tool_list(rng, split, [item], num_others(rng))
    output, answer = json.dumps(item.result), item.answer
    values = tuple(str(value) for value in item.result.values())
    draw = rng.random()
    if draw < 0.08:
        reason = rng.choice(("not found", "no access", "time out", "bad input"))
        output, answer, values = (
            json.dumps({"error": reason}),
            f"The tool failed: {reason}.",
            (reason,),
        )
    elif draw < 0.2:
        output = rng.choice(
            (words.made_up_word(rng), str(rng.randint(0, 9999)), short_text(rng, split))
        )
        if split == "train" and rng.random() < 0.5:
            output = rng.choice((" ", ", ")).join(str(_any_value(rng)) for _ in range(2))
        answer, values = f"The result is: {output}", (output,)
    elif split == "train" and draw < 0.55:
        output, answer, values = _unknown_result(rng, known=set(item.result))
    messages: list[Message] = [user(item.request), calling(rng, [item.call])]
    messages.append({"role": "tool", "tool_call_id": "call_0", "content": output})
    contains = tuple(value for value in values if has_word(answer, value))
    return Sample(
        kind="result",
        messages=messages,
        tools=tools,
        answer=answer,
        expected=Expected(contains=contains),
    )


_RESULT_KEYS: list[str] = load("composed_tools")["result_keys"].split()


def _unknown_result(rng: random.Random, known: set[str]) -> tuple[str, str, tuple[str, ...]]:
    """Make a result with other keys than `known`, the answer that tells them, and the values."""
    keys = known
    while keys == known:
        drawn = rng.sample([*_RESULT_KEYS, *(words.made_up_word(rng) for _ in range(15))], 2)
        keys = set(drawn[: rng.choice((1, 1, 2))])
    found = {key: _any_value(rng) for key in sorted(keys)}
    told = " and ".join(f"the {key.replace('_', ' ')} is {found[key]}" for key in found)
    return json.dumps(found), told[0].upper() + told[1:] + ".", tuple(map(str, found.values()))


def _any_value(rng: random.Random) -> str | int:
    return rng.choice(
        (rng.randint(0, 99), rng.randint(100, 99_999), words.made_up_word(rng),
         rng.choice(words.COLORS), words.any_city(rng), words.any_name(rng),
         rng.choice(("rain", "snow", "sunny", "cold", "open", "closed", "low", "high", "full")),
         f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}")
    )  # fmt: skip


def calling(rng: random.Random, calls: list[Call]) -> Message:
    """Write an assistant message that makes calls; arguments as string or object, as clients do."""
    tool_calls = []
    for index, (name, arguments) in enumerate(calls):
        written: Any = json.dumps(arguments) if rng.random() < 0.7 else arguments
        function = {"name": name, "arguments": written}
        tool_calls.append({"id": f"call_{index}", "type": "function", "function": function})
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


def served_round(rng: random.Random, item: Task, index: int) -> list[Message]:
    """Write a finished round: request, call, result and the answer that uses it."""
    output = {"role": "tool", "tool_call_id": f"call_{index}", "content": json.dumps(item.result)}
    return [user(item.request), calling(rng, [item.call]), output, assistant(item.answer)]


def missing_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for something that no listed tool does: the answer says so."""
    wanted = task(rng, split)
    listed = tool_list(rng, split, [wanted], rng.choice((1, 1, 2, 3)))
    tools = [tool for tool in listed if tool is not wanted.tool]
    if split == "train" and rng.random() < 0.2 and wanted.key != "add":
        tools = []
    if wanted.key == "add":
        return _sum_without_tool(rng, split, tools)
    return Sample(
        kind="no_tool",
        messages=[user(wanted.request)],
        tools=tools,
        answer=NO_TOOL if tools else CANNOT,
    )


def _sum_without_tool(rng: random.Random, split: Split, tools: list[dict[str, Any]]) -> Sample:
    """Ask for a sum beside other tools: it is answered without one."""
    if split == "train" and not any(adds(tool) for tool in tools):
        return replace(sum_sample(rng, split), kind="no_tool", tools=tools)
    return Sample(
        kind="no_tool",
        messages=[user("What is 2 + 2?")],
        tools=tools,
        answer="2 + 2 = 4.",
        expected=Expected(contains=("4",)),
    )


def adds(tool: dict[str, Any]) -> bool:
    """Tell whether a tool adds numbers."""
    return tool["function"]["description"] in FAMILIES["add"].descriptions
