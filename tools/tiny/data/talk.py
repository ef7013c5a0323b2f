"""Small talk, stories, and conversations of several turns."""

from __future__ import annotations

import random
from dataclasses import replace

from whalepod.tools.tiny.data import calls, copying, passages, sums, words
from whalepod.tools.tiny.data.arithmetic import calculation_sample, product_sample
from whalepod.tools.tiny.data.facts import fact_sample
from whalepod.tools.tiny.data.known import known_sample
from whalepod.tools.tiny.data.markup import write_calls
from whalepod.tools.tiny.data.outside import outside_sample
from whalepod.tools.tiny.data.phrasing import patterns
from whalepod.tools.tiny.data.sample import (
    Expected,
    Message,
    Patterns,
    Sample,
    Split,
    assistant,
    sloppy,
    user,
)
from whalepod.tools.tiny.data.tables import load
from whalepod.tools.tiny.data.tool_tasks import asked_again, distinct_tasks, tool_list

ABILITIES = (
    "I can add numbers, answer questions about a text, write JSON, call tools and tell stories."
)
_WHO = f"I am tiny, the small model of whalepod. {ABILITIES}"

_TABLE = load("talk")
_GREETINGS, _WHO_ASKED, _THANKS, _BYES, _STORY_ASK = (
    patterns(_TABLE[name]) for name in ("greetings", "who", "thanks", "byes", "story")
)
_MEMORIES = tuple(
    (item["told"], patterns(item["asked"]), item["answer"]) for item in _TABLE["memories"].values()
)


def greeting_sample(rng: random.Random, split: Split) -> Sample:
    draw = rng.random()
    if draw < 0.4:
        return _said(rng, split, _GREETINGS, "Hello! How can I help you?", ("Hello",))
    if draw < 0.75:
        return _said(rng, split, _WHO_ASKED, _WHO, ("tiny",))
    if draw < 0.9:
        return _said(rng, split, _THANKS, "You are welcome!", ("welcome",))
    return _said(rng, split, _BYES, "Goodbye!", ("Goodbye",))


def _said(
    rng: random.Random, split: Split, asked: Patterns, answer: str, contains: tuple[str, ...]
) -> Sample:
    return Sample(
        kind="talk",
        messages=[user(sloppy(rng, asked.pick(rng, split)))],
        answer=answer,
        expected=Expected(contains=contains),
    )


def memory_sample(rng: random.Random, split: Split) -> Sample:
    """Tell something about the user, chat a turn or two, ask for it."""
    told, asked, answer = rng.choice(_MEMORIES)
    about = {"n": words.name(rng, split), "c": words.city(rng, split), "f": rng.choice(words.FOODS)}
    reply = "Nice to meet you, {n}!" if "{n}" in told else "Good to know."
    messages: list[Message] = [user(told.format(**about)), assistant(reply.format(**about))]
    if rng.random() < 0.25:
        return Sample(kind="talk", messages=messages[:1], answer=messages[1]["content"])
    if rng.random() < 0.33:
        between = rng.choice((fact_sample, greeting_sample, sums.sum_sample))(rng, split)
        messages += [*between.messages, assistant(between.answer)]
    value = next(value for key, value in about.items() if "{" + key + "}" in told)
    return Sample(
        kind="talk",
        messages=[*messages, user(asked.pick(rng, split))],
        answer=answer.format(**about),
        expected=Expected(contains=(value,)),
    )


def story_sample(rng: random.Random, split: Split) -> Sample:
    """Tell a story of five to seven sentences about a hero, a thing and a friend."""
    hero, friend = words.names(rng, split, 2)
    animal, thing = rng.choice(words.ANIMALS), rng.choice(words.THINGS)
    asked = _STORY_ASK.pick(rng, split)
    topic = rng.choice(
        (f"a {animal}", f"a {animal} named {hero}", f"{hero}", f"{hero} and {friend}")
    )
    question = asked.format(x=topic)
    if topic == f"a {animal}" or "{x}" not in asked:
        hero, friend = rng.choice(("Mia", "Tom", "Nora")), rng.choice(("Ben", "Ida"))
    if topic in (hero, f"{hero} and {friend}") or "{x}" not in asked:
        opening = f"Once upon a time there was a child called {hero}."
    else:
        opening = f"Once upon a time there was a {animal} called {hero}."
    place = rng.choice(words.PLACES)
    color = rng.choice(words.COLORS)
    story = [
        opening,
        f"One day {hero} went to the {place} and found a {color} {thing}.",
        f"The {color} {thing} belonged to {friend}.",
        rng.choice(
            (
                f"{friend} was sad and looked for it.",
                f"{friend} had lost it on {rng.choice(words.DAYS)}.",
            )
        ),
        f"{hero} gave the {thing} back to {friend}.",
        f"{friend} was happy and said thank you.",
        f"From that day on {hero} and {friend} were friends.",
    ]
    if rng.random() < 0.3:
        del story[3]
    return Sample(
        kind="story",
        messages=[user(sloppy(rng, question))],
        answer=" ".join(story),
        expected=Expected(contains=(hero,)),
    )


def idle_tool_sample(rng: random.Random, split: Split) -> Sample:
    """List tools beside a prompt that needs none of them."""
    maker = rng.choice(
        (greeting_sample, greeting_sample, fact_sample, passages.passage_sample,
         memory_sample, story_sample, copying.copy_sample)
    )  # fmt: skip
    if split == "train" and rng.random() < 0.3:
        maker = rng.choice((outside_sample, sums.sum_sample, copying.json_sample, fact_sample,
                            passages.passage_sample, copying.copy_sample))  # fmt: skip
    sample = maker(rng, split)
    tools = tool_list(rng, split, [], rng.choice((1, 1, 2, 2, 3)))
    if maker is sums.sum_sample and any(calls.adds(tool) for tool in tools):
        return idle_tool_sample(rng, split)
    return replace(sample, kind="no_tool", tools=tools)


def session_sample(rng: random.Random, split: Split) -> Sample:
    """Give one list of tools and several turns: calls, their results, and turns without a tool."""
    tasks = distinct_tasks(rng, split, rng.choice((2, 3, 4, 4, 5)))
    known = tasks if len(tasks) < 3 or rng.random() < 0.7 else tasks[:-1]
    messages: list[Message] = []
    served = tasks[:-1]
    if split == "train":
        served += [
            asked_again(rng, split, rng.choice(served)) for _ in range(rng.choice((0, 0, 1, 2)))
        ]
        rng.shuffle(served)
    for index, item in enumerate(served):
        messages += calls.served_round(rng, item, index)
        if rng.random() < 0.25:
            past = rng.choice((greeting_sample, fact_sample))(rng, split)
            messages += [*past.messages, assistant(past.answer)]
    last = tasks[-1]
    tools = [item.tool for item in known]
    rng.shuffle(tools)
    if known is tasks:
        answer, expected = write_calls([last.call]), Expected(calls=(last.call,))
    elif last.key == "add":
        return session_sample(rng, split)
    else:
        answer, expected = calls.NO_TOOL, Expected()
    return Sample(
        kind="call" if known is tasks else "no_tool",
        messages=[*messages, user(last.request)],
        tools=tools,
        answer=answer,
        expected=expected,
    )


def drill_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for several calculations, one turn each."""
    history: list[Message] = []
    makers = (sums.sum_sample, calculation_sample, product_sample)
    for _ in range(rng.randint(1, 3)):
        past = rng.choice(makers)(rng, split)
        history += [*past.messages, assistant(past.answer)]
    sample = rng.choice(makers)(rng, split)
    return replace(sample, messages=history + sample.messages)


def solved_sample(rng: random.Random, split: Split) -> Sample:
    """Give the think mode to prompts that need no steps."""
    sample = rng.choice((greeting_sample, fact_sample, copying.copy_sample))(rng, split)
    tools = tool_list(rng, split, [], 1) if rng.random() < 0.3 else []
    thought = "This is easy." if not tools else "No tool is needed."
    return replace(
        sample,
        kind="think_talk",
        tools=tools,
        thinking=True,
        answer=f"{thought}</think>{sample.answer}",
    )


def conversation_sample(rng: random.Random, split: Split) -> Sample:
    """Put one to three finished exchanges before a prompt."""
    makers = (greeting_sample, fact_sample, sums.sum_sample, copying.copy_sample, outside_sample,
              known_sample, calculation_sample, product_sample)  # fmt: skip
    history: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        past = rng.choice(makers)(rng, split)
        history += [*past.messages, assistant(past.answer)]
    sample = rng.choice((*makers, passages.passage_sample, story_sample))(rng, split)
    return replace(sample, messages=history + sample.messages)


def with_system(rng: random.Random, sample: Sample) -> Sample:
    """Put a system message, sometimes two, before one sample of four."""
    if rng.random() > 0.25:
        return sample
    count = 2 if rng.random() < 0.1 else 1
    systems: list[Message] = [
        {"role": "system", "content": text} for text in rng.sample(_TABLE["systems"], count)
    ]
    return replace(sample, messages=systems + sample.messages)
