"""Families of tools for training alone: held-out requests are for none of them."""

from __future__ import annotations

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import varied
from whalepod.tools.tiny.data.sample import Patterns
from whalepod.tools.tiny.data.tool_family import (
    Argument,
    Family,
    choice,
    coined,
    found_text,
    integer,
    path,
    same,
    short_text,
)

MORE_FAMILIES: dict[str, Family] = {
    "music": Family(
        names=Patterns(train=("play_music", "music_player", "play"), dev=(), test=()),
        descriptions=("Play music", "Play a song"),
        arguments={"title": Argument(same("title", "song", "track"), coined)},
        requests=varied(
            (
                "Play {title}.", "do> play the song {title}", "do> play {title}",
                "do> put on the music {title}", "I want to hear {title}.",
            ),
            dev=(), test=(),
        ),
        answer="I play {title}.",
    ),
    "news": Family(
        names=Patterns(train=("get_news", "news", "headlines"), dev=(), test=()),
        descriptions=("Get the news of a place", "News"),
        arguments={"place": Argument(same("place", "city", "region"), words.city)},
        requests=varied(
            (
                "What is new in {place}?", "News of {place}", "what> the news of {place}",
                "what> the news from {place}", "do> check the news in {place}",
                "if> what is new in {place}",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"headline": found_text(rng)},
        answer="The news: {headline}",
    ),
    "joke": Family(
        names=Patterns(train=("tell_joke", "joke", "random_joke"), dev=(), test=()),
        descriptions=("Tell a joke", "A joke of the day"),
        arguments={},
        requests=varied(
            (
                "Tell me a joke.", "A joke, please.", "do> tell a joke", "do> make me laugh",
                "what> a good joke",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"joke": found_text(rng)},
        answer="Here it is: {joke}",
    ),
    "count_letters": Family(
        names=Patterns(train=("count_letters", "word_length", "letters"), dev=(), test=()),
        descriptions=("Count the letters of a word", "Length of a word"),
        arguments={"word": Argument(same("word", "text"), coined)},
        requests=varied(
            (
                "How many letters has {word}?", "do> count the letters of {word}",
                "what> the number of letters in {word}", "what> the length of {word}",
                "if> how many letters {word} has",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"length": rng.randint(2, 12)},
        answer="{word} has {length} letters.",
    ),
    "random_number": Family(
        names=Patterns(train=("random_number", "random", "pick_number"), dev=(), test=()),
        descriptions=("Pick a random number", "Random number up to a limit"),
        arguments={"limit": Argument(same("limit", "max", "high"), integer(2, 999), "integer")},
        requests=varied(
            (
                "Pick a number up to {limit}.", "A random number up to {limit}",
                "do> pick a random number up to {limit}", "do> choose a number below {limit}",
                "what> a random number up to {limit}",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"value": rng.randint(1, 99)},
        answer="The number is {value}.",
    ),
    "call_person": Family(
        names=Patterns(train=("call_person", "call", "dial"), dev=(), test=()),
        descriptions=("Call a person", "Call someone on the phone"),
        arguments={"name": Argument(same("name", "person", "contact"), words.name)},
        requests=varied(
            (
                "Call {name}.", "do> call {name}", "do> call {name} on the phone",
                "do> ring {name}", "I want to talk to {name}.",
            ),
            dev=(), test=(),
        ),
        answer="I call {name}.",
    ),
    "delete_file": Family(
        names=Patterns(train=("delete_file", "remove_file", "rm"), dev=(), test=()),
        descriptions=("Delete a file", "Remove a file"),
        arguments={"path": Argument(same("path", "file"), path)},
        requests=varied(
            (
                "Delete {path}", "do> delete the file {path}", "say> remove {path}",
                "do> remove {path}", "I do not need {path}. Delete it.",
            ),
            dev=(), test=(),
        ),
        answer="I deleted {path}.",
    ),
    "write_file": Family(
        names=Patterns(train=("write_file", "save_file", "create_file"), dev=(), test=()),
        descriptions=("Write text to a file", "Save a file"),
        arguments={
            "path": Argument(same("path", "file", "filename"), path),
            "text": Argument(same("text", "content", "body"), short_text),
        },
        requests=varied(
            (
                'Write "{text}" to {path}.', 'do> write "{text}" to the file {path}',
                'do> save "{text}" as {path}', "say> save to {path}: {text}",
                'do> put "{text}" into the file {path}',
            ),
            dev=(), test=(),
        ),
        answer="I wrote {path}.",
    ),
    "define": Family(
        names=Patterns(train=("define_word", "dictionary", "meaning"), dev=(), test=()),
        descriptions=("Look up the meaning of a word", "Dictionary"),
        arguments={"word": Argument(same("word", "term"), coined)},
        requests=varied(
            (
                "What does {word} mean?", "Define {word}.", "what> the meaning of {word}",
                "do> define the word {word}", "do> look up the word {word}",
                "if> what {word} means",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"meaning": found_text(rng)},
        answer="{word} means: {meaning}",
    ),
    "multiply": Family(
        names=Patterns(train=("multiply", "times", "calc_product"), dev=(), test=()),
        descriptions=("Multiply two numbers", "Product of two numbers"),
        arguments={
            "a": Argument(same("a", "x", "first"), integer(2, 99), "integer"),
            "b": Argument(same("b", "y", "second"), integer(2, 99), "integer"),
        },
        requests=varied(
            (
                "What is {a} times {b}?", "do> multiply {a} by {b}", "do> multiply {a} and {b}",
                "what> the product of {a} and {b}", "what> {a} times {b}",
                "if> how much {a} times {b} is",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"result": slots["a"] * slots["b"]},
        answer="{a} times {b} is {result}.",
    ),
    "light": Family(
        names=Patterns(train=("set_light", "light", "lamp_color"), dev=(), test=()),
        descriptions=("Set the light of a room", "Change the color of a lamp"),
        arguments={
            "place": Argument(same("place", "room"), choice(*words.PLACES)),
            "color": Argument(same("color"), choice(*words.COLORS)),
        },
        requests=varied(
            (
                "Make the light in the {place} {color}.",
                "do> set the light at the {place} to {color}",
                "do> turn the light in the {place} {color}",
                "do> change the lamp of the {place} to {color}",
                "I want {color} light in the {place}.",
            ),
            dev=(), test=(),
        ),
        answer="The light in the {place} is {color}.",
    ),
    "calendar": Family(
        names=Patterns(train=("get_events", "calendar", "list_events"), dev=(), test=()),
        descriptions=("List the events of a day", "Read the calendar"),
        arguments={"day": Argument(same("day", "date"), choice(*words.DAYS))},
        requests=varied(
            (
                "What do I have on {day}?", "What is on {day}?", "do> list the events of {day}",
                "do> show my calendar for {day}", "what> my plans for {day}",
                "if> what I have on {day}",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"events": rng.randint(0, 9)},
        answer="You have {events} events on {day}.",
    ),
    "train": Family(
        names=Patterns(train=("find_train", "train_times", "next_train"), dev=(), test=()),
        descriptions=("Find a train between two cities", "Next train"),
        arguments={
            "start": Argument(same("from", "start", "origin"), words.city),
            "end": Argument(same("to", "end", "destination"), words.city),
            "day": Argument(same("day", "date"), choice(*words.DAYS)),
        },
        requests=varied(
            (
                "Is there a train from {start} to {end} on {day}?",
                "When does the train from {start} to {end} leave on {day}?",
                "do> find a train from {start} to {end} on {day}",
                "do> look up trains from {start} to {end} for {day}",
                "what> the train from {start} to {end} on {day}",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        answer="The train to {end} leaves at {time}.",
    ),
    "pay": Family(
        names=Patterns(train=("send_money", "pay", "transfer"), dev=(), test=()),
        descriptions=("Send money to a person", "Pay someone"),
        arguments={
            "name": Argument(same("to", "name", "recipient"), words.name),
            "amount": Argument(same("amount", "coins", "sum"), integer(1, 999), "integer"),
        },
        requests=varied(
            (
                "Pay {name} {amount} coins.", "do> send {amount} coins to {name}",
                "do> pay {amount} coins to {name}", "do> give {name} {amount} coins",
                "{name} gets {amount} coins from me.",
            ),
            dev=(), test=(),
        ),
        answer="I paid {name} {amount} coins.",
    ),
    "friend": Family(
        names=Patterns(train=("add_contact", "add_friend", "save_contact"), dev=(), test=()),
        descriptions=("Save a contact", "Add a person with a number"),
        arguments={
            "name": Argument(same("name", "person"), words.name),
            "number": Argument(same("number", "phone"), integer(1000, 9999), "integer"),
        },
        requests=varied(
            (
                "Save {name} with the number {number}.",
                "The number of {name} is {number}. Save it.",
                "do> add {name} with the number {number}",
                "do> save the number {number} for {name}",
                "do> note that {name} has the number {number}",
            ),
            dev=(), test=(),
        ),
        answer="I saved {name}.",
    ),
    "color_of": Family(
        names=Patterns(train=("get_color", "color_code", "pick_color"), dev=(), test=()),
        descriptions=("Get the code of a color", "Color code"),
        arguments={"color": Argument(same("color", "name"), choice(*words.COLORS))},
        requests=varied(
            (
                "Which code has {color}?", "what> the code of the color {color}",
                "do> look up the color {color}", "do> get the code for {color}",
                "if> which code {color} has",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"code": rng.randint(100, 999)},
        answer="The code of {color} is {code}.",
    ),
    "recipe": Family(
        names=Patterns(train=("find_recipe", "recipe", "cook_book"), dev=(), test=()),
        descriptions=("Find a recipe", "How to cook a meal"),
        arguments={"food": Argument(same("food", "dish", "meal"), choice(*words.FOODS))},
        requests=varied(
            (
                "How do I cook {food}?", "what> a recipe for {food}",
                "do> find a recipe for {food}", "do> look up how to make {food}",
                "if> how to cook {food}",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"minutes": rng.randint(5, 90)},
        answer="The {food} needs {minutes} minutes.",
    ),
    "hotel": Family(
        names=Patterns(train=("find_hotel", "hotels", "search_hotel"), dev=(), test=()),
        descriptions=("Find a hotel in a city", "Hotels by city and price"),
        arguments={
            "city": Argument(same("city", "place"), words.city),
            "price": Argument(same("max_price", "price", "limit"), integer(20, 400), "integer"),
        },
        requests=varied(
            (
                "Is there a hotel in {city} for {price} coins?",
                "do> find a hotel in {city} up to {price} coins",
                "do> look for a hotel in {city}, at most {price} coins",
                "what> a hotel in {city} for {price} coins",
                "I sleep in {city} and can pay {price} coins. Find a hotel.",
            ),
            dev=(), test=(),
        ),
        result=lambda rng, slots: {"hotels": rng.randint(0, 20)},
        answer="I found {hotels} hotels in {city}.",
    ),
    "vote": Family(
        names=Patterns(train=("vote", "cast_vote", "rate"), dev=(), test=()),
        descriptions=("Rate an item", "Give points to an item"),
        arguments={
            "item": Argument(same("item", "thing"), choice(*words.THINGS)),
            "points": Argument(same("points", "stars", "score"), integer(1, 10), "integer"),
        },
        requests=varied(
            (
                "{points} points for the {item}.", "do> give the {item} {points} points",
                "do> rate the {item} with {points}", "The {item} gets {points} points.",
            ),
            dev=(), test=(),
        ),
        answer="The {item} has {points} points.",
    ),
    "temperature": Family(
        names=Patterns(train=("set_temperature", "heating", "heat"), dev=(), test=()),
        descriptions=("Set the temperature of a place", "Heating"),
        arguments={
            "place": Argument(same("place", "room"), choice(*words.PLACES)),
            "degrees": Argument(same("degrees", "value", "temperature"), integer(5, 30), "integer"),
        },
        requests=varied(
            (
                "Make it {degrees} degrees in the {place}.",
                "do> heat the {place} to {degrees} degrees",
                "do> set the {place} to {degrees} degrees",
                "It should be {degrees} degrees in the {place}.",
            ),
            dev=(), test=(),
        ),
        answer="The {place} gets {degrees} degrees.",
    ),
}  # fmt: skip
