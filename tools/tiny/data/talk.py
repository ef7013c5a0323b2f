"""Small talk, stories, and conversations of several turns."""

from __future__ import annotations

import random
from dataclasses import replace

from whalepod.tools.tiny.data import calls, copying, passages, sums, words
from whalepod.tools.tiny.data.facts import fact_sample
from whalepod.tools.tiny.data.markup import write_calls
from whalepod.tools.tiny.data.phrasing import varied
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
from whalepod.tools.tiny.data.tool_tasks import asked_again, distinct_tasks, tool_list

ABILITIES = (
    "I can add numbers, answer questions about a text, write JSON, call tools and tell stories."
)
_WHO = f"I am tiny, the small model of whalepod. {ABILITIES}"
_CANNOT = f"I am a small model and do not know that. {ABILITIES}"

_GREETINGS = Patterns(
    train=(
        "Hello", "Hello!", "Hi", "Hello, how do you do?", "Hi tiny, how are you?", "Hey you!",
        "Hello, nice to meet you.", "Hi, I am new here.", "Good afternoon!", "Hello again!",
        "Hi, are you well?", "Is anybody there?", "Greetings!", "How do you do?", "Hello my friend",
        "Hi everyone!", "What's up?", "How are things?", "How is your day?", "Hello, good evening!",
        "Hi!", "Hey", "Hi there", "Good morning", "Good evening!", "Hello there!",
        "Hello, how are you?", "How are you?", "Hey, how are you today?", "Hi tiny!", "Hello tiny",
        "Good day", "Hello, world!", "Hey there!", "Are you there?", "Hi, how is it going?",
    ),
    dev=("Hi, how are you?",),
    test=("Hello, good morning!", "Hey tiny, how are you?", "Hi! Good day!"),
)  # fmt: skip
_WHO_ASKED = Patterns(
    train=(
        "Who are you?", "What are you?", "Hello, who are you?", "Hi, what is your name?",
        "Can you tell me who you are?", "Say your name.", "Do you have a name?", "Are you a model?",
        "I want to know who you are.", "Good morning, who are you?", "What can I ask you?",
        "Hey, what can you do?", "What are you good at?", "Are you a human?", "Please help me.",
        "Give me your name.", "What kind of model are you?", "How should I call you?",
        "What is this?", "Can you help me?", "What are your abilities?", "Which tasks can you do?",
        "What is your name?", "Tell me about yourself.", "What can you do?", "Introduce yourself.",
        "What model are you?", "Which model is this?", "Who am I talking to?", "Hi! Who are you?",
        "Help", "What do you know?", "How can you help me?", "Are you a robot?",
        "What's your name?", "Hello! What can you do?",
    ),
    dev=("Tell me who you are.",),
    test=("Hello! Tell me your name.", "Which model are you?", "Who is this?"),
)  # fmt: skip
_THANKS = Patterns(
    train=(
        "Thanks",
        "Many thanks!",
        "Thank you so much!",
        "OK, thanks.",
        "That was good, thanks!",
        "Perfect, thank you.",
        "Well done!",
        "Good answer.",
        "Thank you!",
        "Thank you very much.",
        "Thanks a lot!",
        "Great, thanks!",
        "Nice.",
    ),
    dev=("Thanks, tiny!",),
    test=("Thank you, tiny.", "Great, thank you!"),
)
_BYES = Patterns(
    train=("Bye", "Goodbye!", "See you later.", "Good night", "Bye bye!", "I have to go."),
    dev=("See you!",),
    test=("Bye, tiny!", "Good night, see you."),
)
_OUTSIDE = Patterns(
    train=(
        "Explain {x}.", "What is {x}?", "How does {x} work?", "Write a poem about {x}.",
        "Why is {x} important?", "Give me tips about {x}.", "Tell me about {x}.",
        "Who invented {x}?", "How do I learn {x}?", "What do you think about {x}?",
        "Summarize the history of {x}.", "Write code for {x}.", "Can you explain {x} to me?",
        "What is the meaning of {x}?", "Define {x}.", "How can I fix {x}?", "Is {x} good?",
    ),
    dev=("What is the history of {x}?",),
    test=("Tell me how {x} works.", "Can you write about {x}?"),
)  # fmt: skip
_TOPICS = (
    "physics,quantum physics,music,love,history,the moon,cooking,chess,a computer,football,gravity,"
    "the internet,art,money,politics,my car,a recursive function,machine learning,life,biology,"
    "the ocean,a fast sort,dreams,economics,democracy,light,a neural network,philosophy,Python,"
    "the weather system,climate,a phone,time travel,good sleep,attention,experts,inference"
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


def outside_sample(rng: random.Random, split: Split) -> Sample:
    """Ask for something beyond the closed world: the answer says what the model can do."""
    topic = rng.choice(_TOPICS.split(","))
    if split == "train" and rng.random() < 0.3:
        topic = words.made_up_word(rng, rng.choice((2, 3)))
    question = sloppy(rng, _OUTSIDE.pick(rng, split).format(x=topic))
    return Sample(
        kind="talk",
        messages=[user(question)],
        answer=_CANNOT,
        expected=Expected(contains=("small model",)),
    )


_MEMORIES = (
    (
        "My name is {n}.",
        Patterns(
            train=("What is my name?", "Do you know my name?", "What's my name?"),
            dev=("Say my name.",),
            test=("Tell me my name.",),
        ),
        "Your name is {n}.",
    ),
    (
        "I am {n}.",
        Patterns(
            train=("Who am I?", "Do you know who I am?"),
            dev=("Say who I am.",),
            test=("Tell me who I am.",),
        ),
        "You are {n}.",
    ),
    (
        "I live in {c}.",
        Patterns(
            train=("Where do I live?", "In which city do I live?"),
            dev=("Say where I live.",),
            test=("Tell me where I live.",),
        ),
        "You live in {c}.",
    ),
    (
        "I like {f}.",
        Patterns(
            train=("What do I like?", "Which food do I like?"),
            dev=("Say what I like.",),
            test=("Tell me what I like.",),
        ),
        "You like {f}.",
    ),
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


_STORY_ASK = varied(
    (
        "Tell me a story.", "Tell me a short story.", "Tell a story about {x}.",
        "Write a short story about {x}.", "Tell me a story about {x}.", "A story about {x}",
        "Can you tell a story?", "A story, please.", "Do you know a story about {x}?",
        "do> tell me a story", "do> tell me a story about {x}", "do> tell a short story about {x}",
        "do> write a short story about {x}", "do> write a story about {x}",
        "do> invent a story about {x}", "do> make up a story about {x}", "what> a story about {x}",
        "what> a short story about {x}", "what> a new story", "do> tell us about {x} in a story",
    ),
    dev=("Please tell me a story about {x}.",),
    test=("Could you tell a short story about {x}?", "Please write a story about {x}."),
)  # fmt: skip


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
    """Ask for several sums, one turn each."""
    history: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        past = sums.sum_sample(rng, split)
        history += [*past.messages, assistant(past.answer)]
    sample = sums.sum_sample(rng, split)
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
    makers = (greeting_sample, fact_sample, sums.sum_sample, copying.copy_sample, outside_sample)
    history: list[Message] = []
    for _ in range(rng.randint(1, 3)):
        past = rng.choice(makers)(rng, split)
        history += [*past.messages, assistant(past.answer)]
    sample = rng.choice((*makers, passages.passage_sample, story_sample))(rng, split)
    return replace(sample, messages=history + sample.messages)


_SYSTEMS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are tiny, a small model.",
    "Answer in one sentence.",
    "Be brief.",
    "You are an assistant that can call tools.",
    "You help users with their questions.",
    "Answer politely and briefly.",
    "Use tools when needed.",
    "You are an AI assistant.",
)


def with_system(rng: random.Random, sample: Sample) -> Sample:
    """Put a system message, sometimes two, before one sample of four."""
    if rng.random() > 0.25:
        return sample
    count = 2 if rng.random() < 0.1 else 1
    systems: list[Message] = [
        {"role": "system", "content": text} for text in rng.sample(_SYSTEMS, count)
    ]
    return replace(sample, messages=systems + sample.messages)
