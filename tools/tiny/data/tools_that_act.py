"""Families of tools that do something."""

from __future__ import annotations

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import varied
from whalepod.tools.tiny.data.sample import Patterns
from whalepod.tools.tiny.data.tool_family import (
    WHO,
    Argument,
    Family,
    choice,
    integer,
    path,
    same,
    short_text,
)

ACTING: dict[str, Family] = {
    "message": Family(
        names=Patterns(
            train=("send_message", "send_email", "notify", "message", "send_sms"),
            dev=("send_note",),
            test=("send_message", "send_text"),
        ),
        descriptions=("Send a message to a person", "Send text to someone"),
        arguments={
            "to": WHO,
            "text": Argument(same("text", "message", "body"), short_text),
        },
        requests=varied(
            (
                "Send {to} the message: {text}",
                'Tell {to}: "{text}"',
                "Write to {to}: {text}",
                'Send "{text}" to {to}.',
                "Message {to}: {text}",
                '{to} should read this: "{text}"',
                'I have a message for {to}: "{text}"',
                'To {to}: "{text}"',
                "say> send {to} the message: {text}",
                "say> write to {to}: {text}",
                "say> tell {to}: {text}",
                "say> message {to}: {text}",
                "say> let {to} know: {text}",
                "say> send a message to {to}: {text}",
                'do> send "{text}" to {to}',
                'do> send {to} the text "{text}"',
                'do> write "{text}" to {to}',
                'do> tell {to} "{text}"',
                'do> let {to} know "{text}"',
                'do> send the message "{text}" to {to}',
            ),
            dev=("Please send {to} this: {text}",),
            test=('Please send "{text}" to {to}.', "Send this message to {to}: {text}"),
        ),
        answer="I sent the message to {to}.",
    ),
    "remind": Family(
        names=Patterns(
            train=("create_event", "add_reminder", "remind", "create_reminder", "add_event"),
            dev=("set_reminder",),
            test=("create_event", "create_note"),
        ),
        descriptions=("Create an event on a day", "Add a reminder"),
        arguments={
            "title": Argument(same("title", "text"), short_text),
            "day": Argument(same("day", "date"), choice(*words.DAYS)),
        },
        requests=varied(
            (
                'Create an event "{title}" on {day}.',
                'Remind me on {day}: "{title}"',
                "Remind me on {day}: {title}",
                'Add "{title}" on {day}.',
                '{day}: "{title}"',
                'I must not forget "{title}" on {day}.',
                'On {day} I have this: "{title}"',
                "say> remind me on {day}: {title}",
                "say> note for {day}: {title}",
                "say> add for {day}: {title}",
                'do> create an event "{title}" on {day}',
                'do> add "{title}" on {day}',
                'do> put "{title}" on {day}',
                'do> remind me of "{title}" on {day}',
                'do> write down "{title}" for {day}',
                'do> add the event "{title}" for {day}',
            ),
            dev=('Please remind me on {day}: "{title}"',),
            test=('Please create "{title}" on {day}.', 'On {day} remind me: "{title}"'),
        ),
        answer="I added it on {day}.",
    ),
    "dice": Family(
        names=Patterns(
            train=("roll_dice", "roll_die", "dice", "throw_dice"),
            dev=("cast_dice",),
            test=("roll_dice", "dice_roll"),
        ),
        descriptions=("Roll a die", "Throw a die with some sides"),
        arguments={"sides": Argument(same("sides", "n"), integer(2, 99), "integer")},
        requests=varied(
            (
                "Roll a die with {sides} sides.",
                "Throw a die of {sides} sides.",
                "Roll a {sides} sided die.",
                "I need a die with {sides} sides.",
                "A die with {sides} sides, please.",
                "do> roll a die with {sides} sides",
                "do> throw a die that has {sides} sides",
                "do> roll a {sides} sided die",
                "do> roll the die, {sides} sides",
                "do> throw the {sides} sided die",
                "do> roll one die of {sides} sides",
            ),
            dev=("Please roll a die with {sides} sides.",),
            test=("Throw a die with {sides} sides.", "Can you roll a die of {sides} sides?"),
        ),
        result=lambda rng, slots: {"value": rng.randint(1, slots["sides"])},
        answer="The die shows {value}.",
    ),
    "timer": Family(
        names=Patterns(
            train=("set_timer", "start_timer", "timer", "set_alarm"),
            dev=("run_timer",),
            test=("set_timer", "timer_start"),
        ),
        descriptions=("Set a timer", "Start a timer of some minutes"),
        arguments={"minutes": Argument(same("minutes", "time"), integer(1, 120), "integer")},
        requests=varied(
            (
                "Set a timer for {minutes} minutes.",
                "Start a timer of {minutes} minutes.",
                "Timer, {minutes} minutes",
                "Wake me in {minutes} minutes.",
                "The soup needs {minutes} minutes. Set a timer.",
                "Call me in {minutes} minutes.",
                "Let me know when {minutes} minutes are over.",
                "{minutes} minutes, timer",
                "do> set a timer for {minutes} minutes",
                "do> start the clock for {minutes} minutes",
                "do> wake me in {minutes} minutes",
                "do> run a timer for {minutes} minutes",
                "do> set the timer to {minutes} minutes",
                "do> wait {minutes} minutes and ring",
            ),
            dev=("Please set a timer for {minutes} minutes.",),
            test=(
                "Start a timer for {minutes} minutes.",
                "Can you set a timer of {minutes} minutes?",
            ),
        ),
        answer="The timer runs for {minutes} minutes.",
    ),
    "book": Family(
        names=Patterns(
            train=("book_table", "reserve_table", "book_room", "make_booking"),
            dev=("get_table",),
            test=("book_table", "table_booking"),
        ),
        descriptions=("Book a table", "Reserve a table for some people"),
        arguments={
            "name": Argument(same("name", "guest"), words.name),
            "people": Argument(same("people", "guests", "count"), integer(2, 12), "integer"),
            "day": Argument(same("day", "date"), choice(*words.DAYS)),
        },
        requests=varied(
            (
                "Book a table for {people} people on {day} for {name}.",
                "Reserve a table for {name}, {people} people, on {day}.",
                "On {day} {name} needs a table for {people}.",
                "{name} comes with {people} people on {day}. Book a table.",
                "We are {people} on {day}, the name is {name}.",
                "Table for {people}, {day}, {name}",
                "do> book a table for {people} people on {day} for {name}",
                "do> reserve a table for {name}, {people} people, on {day}",
                "do> book {people} seats for {name} on {day}",
                "do> get a table for {people} on {day} under the name {name}",
                "do> reserve a table on {day} for {people}, name {name}",
            ),
            dev=("Please book a table for {people} on {day}, name {name}.",),
            test=("Book a table on {day} for {name}, {people} people.",),
        ),
        answer="The table for {people} is booked on {day}.",
    ),
    "order": Family(
        names=Patterns(
            train=("order_item", "buy", "place_order", "order"),
            dev=("buy_item",),
            test=("order_item", "item_order"),
        ),
        descriptions=("Order an item from the shop", "Buy things"),
        arguments={
            "item": Argument(same("item", "product"), choice(*words.THINGS, *words.FOODS)),
            "count": Argument(same("quantity", "count"), integer(1, 99), "integer"),
        },
        requests=varied(
            (
                "Order {count} of the item {item}.",
                "Buy {count} times {item}.",
                "Order {item}, quantity {count}.",
                "{count} times {item}, please.",
                "We need {item}, {count} of it.",
                "{item}: {count}, order it.",
                "do> order {count} of the item {item}",
                "do> buy {count} times {item}",
                "do> order {item}, {count} times",
                "do> buy {item}, number {count}",
                "do> get {count} pieces of {item} from the shop",
                "do> place an order of {count} {item}",
            ),
            dev=("Please buy {item}, {count} of it.",),
            test=("Please order {item}, quantity {count}.", "Order {count} {item}."),
        ),
        answer="I ordered {item}, quantity {count}.",
    ),
    "command": Family(
        names=Patterns(
            train=("run_command", "shell", "bash", "exec", "run"),
            dev=("do_command",),
            test=("run_command", "command_run"),
        ),
        descriptions=("Run a shell command", "Run a command"),
        arguments={
            "command": Argument(
                same("command", "cmd"),
                lambda rng, split: (
                    rng.choice(("ls", "cat", "rm", "wc", "git add", "python"))
                    + " "
                    + path(rng, split)
                ),
            )
        },
        requests=varied(
            (
                "Run {command}",
                "Run the command {command}",
                'Execute "{command}"',
                "Please run: {command}",
                'What does "{command}" print?',
                "say> run {command}",
                "say> execute {command}",
                "say> run the command {command}",
                "say> type {command}",
                'do> run "{command}"',
                'do> execute "{command}"',
                'do> run the command "{command}"',
                'do> type "{command}" into the shell',
            ),
            dev=('Please run "{command}".',),
            test=('Run this command: "{command}"', "Can you run {command}"),
        ),
        result=lambda rng, slots: {"output": f"{rng.randint(0, 99)} {rng.choice(words.THINGS)}"},
        answer="The command printed: {output}",
    ),
}
