"""Families of tools that look something up or work something out."""

from __future__ import annotations

from whalepod.tools.tiny_data import words
from whalepod.tools.tiny_data.sample import Patterns
from whalepod.tools.tiny_data.tool_family import (
    CITY,
    Argument,
    Family,
    choice,
    integer,
    path,
    query,
    same,
    short_text,
    symbol,
)

READING: dict[str, Family] = {
    "weather": Family(
        names=Patterns(
            train=("get_weather", "weather", "get_current_weather", "fetch_weather", "getWeather"),
            dev=("read_weather",),
            test=("get_weather", "weather_lookup"),
        ),
        descriptions=("Get the weather of a city", "Current weather", "Weather in a place"),
        arguments={"city": CITY},
        requests=Patterns(
            train=(
                "What is the weather in {city}?",
                "How is the weather in {city}?",
                "Weather in {city}",
                "Is it raining in {city}?",
                "Tell me the weather in {city}.",
                "What's the weather like in {city}?",
                "How warm is it in {city}?",
                "I want to know the weather in {city}.",
            ),
            dev=("What is the weather like in {city} today?",),
            test=("How is the weather in {city} today?", "Please tell me the weather in {city}."),
        ),
        result=lambda rng, slots: {
            "temperature": rng.randint(-9, 39),
            "sky": rng.choice(("sunny", "cloudy", "rainy", "windy", "clear")),
        },
        answer="It is {sky} in {city} with {temperature} degrees.",
    ),
    "time": Family(
        names=Patterns(
            train=("get_time", "current_time", "clock", "get_local_time", "fetch_time"),
            dev=("read_time",),
            test=("get_time", "time_lookup"),
        ),
        descriptions=("Get the local time of a city", "Current time in a place"),
        arguments={"city": CITY},
        requests=Patterns(
            train=(
                "What time is it in {city}?",
                "Tell me the time in {city}.",
                "What is the time in {city}?",
                "Time in {city}?",
                "How late is it in {city}?",
            ),
            dev=("What is the local time in {city}?",),
            test=("What time is it now in {city}?", "I want to know the time in {city}."),
        ),
        result=lambda rng, slots: {"time": f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"},
        answer="It is {time} in {city}.",
    ),
    "add": Family(
        names=Patterns(
            train=("add", "add_numbers", "sum", "calculate_sum", "calc_add"),
            dev=("sum_numbers",),
            test=("add_numbers", "get_sum"),
        ),
        descriptions=("Add two numbers", "Sum of two numbers"),
        arguments={
            "a": Argument(same("a", "x", "first"), integer(1, 9999), "integer"),
            "b": Argument(same("b", "y", "second"), integer(1, 9999), "integer"),
        },
        requests=Patterns(
            train=(
                "What is {a} + {b}?",
                "Add {a} and {b}.",
                "Use the tool to add {a} and {b}.",
                "How much is {a} plus {b}?",
                "Sum of {a} and {b}?",
            ),
            dev=("What is the sum of {a} and {b}?",),
            test=("Please add {a} and {b} with the tool.", "What is {a} plus {b}?"),
        ),
        result=lambda rng, slots: {"result": slots["a"] + slots["b"]},
        answer="{a} + {b} = {result}.",
    ),
    "search": Family(
        names=Patterns(
            train=("search", "web_search", "search_web", "find", "search_docs"),
            dev=("do_search",),
            test=("web_search", "search_index"),
        ),
        descriptions=("Search the web", "Search for a text", "Find pages"),
        arguments={"query": Argument(same("query", "q", "text"), query)},
        requests=Patterns(
            train=(
                "Search for {query}.",
                'Search the web for "{query}".',
                "Find {query}.",
                "Look up {query}.",
                "Please search: {query}",
                "Search {query}",
            ),
            dev=("Please search for {query}.",),
            test=("Can you search for {query}?", "Search the web for {query}."),
        ),
        result=lambda rng, slots: {"hits": rng.randint(0, 99)},
        answer="I found {hits} pages for {query}.",
    ),
    "convert": Family(
        names=Patterns(
            train=("convert_currency", "convert", "exchange", "currency"),
            dev=("exchange_money",),
            test=("convert_currency", "convert_money"),
        ),
        descriptions=("Convert money", "Convert an amount to another currency"),
        arguments={
            "amount": Argument(same("amount", "value"), integer(1, 999), "number"),
            "source": Argument(
                same("from", "source"), choice("USD", "EUR", "GBP", "JPY", "CHF", "SEK")
            ),
            "target": Argument(
                same("to", "target"), choice("USD", "EUR", "GBP", "JPY", "CHF", "SEK")
            ),
        },
        requests=Patterns(
            train=(
                "Convert {amount} {source} to {target}.",
                "How much is {amount} {source} in {target}?",
                "Change {amount} {source} into {target}.",
                "What are {amount} {source} in {target}?",
            ),
            dev=("Please convert {amount} {source} into {target}.",),
            test=(
                "How many {target} are {amount} {source}?",
                "Change {amount} {source} to {target}.",
            ),
        ),
        result=lambda rng, slots: {"result": rng.randint(1, 9999)},
        answer="{amount} {source} are {result} {target}.",
    ),
    "price": Family(
        names=Patterns(
            train=("get_price", "lookup_price", "price", "check_price", "find_price"),
            dev=("read_price",),
            test=("get_price", "price_lookup"),
        ),
        descriptions=("Get the price of an item", "Price of a thing in the shop"),
        arguments={
            "item": Argument(same("item", "product", "name"), choice(*words.THINGS, *words.FOODS))
        },
        requests=Patterns(
            train=(
                "What does the {item} cost?",
                "How much is the {item}?",
                "What is the price of the {item}?",
                "Price of {item}?",
                "Check the price of {item}.",
            ),
            dev=("How much does the {item} cost?",),
            test=("Tell me the price of the {item}.", "How much do I pay for the {item}?"),
        ),
        result=lambda rng, slots: {"price": rng.randint(1, 99)},
        answer="The {item} costs {price} coins.",
    ),
    "translate": Family(
        names=Patterns(
            train=("translate", "translate_text", "translator"),
            dev=("do_translate",),
            test=("translate_text", "text_translate"),
        ),
        descriptions=("Translate a text", "Translate text into a language"),
        arguments={
            "text": Argument(same("text", "input"), short_text),
            "language": Argument(
                same("language", "target_language", "to"), choice(*words.LANGUAGES)
            ),
        },
        requests=Patterns(
            train=(
                'Translate "{text}" into {language}.',
                "Translate into {language}: {text}",
                'What is "{text}" in {language}?',
                'How do you say "{text}" in {language}?',
            ),
            dev=('Please translate "{text}" to {language}.',),
            test=('Translate "{text}" to {language}.', 'Say "{text}" in {language}.'),
        ),
        result=lambda rng, slots: {"translation": words.made_up_word(rng, 3)},
        answer="In {language} it is: {translation}",
    ),
    "file": Family(
        names=Patterns(
            train=("read_file", "open_file", "cat", "read", "load_file"),
            dev=("show_file",),
            test=("read_file", "file_read"),
        ),
        descriptions=("Read a file", "Read the text of a file"),
        arguments={"path": Argument(same("path", "file", "filename"), path)},
        requests=Patterns(
            train=(
                "Read {path}.",
                "Open the file {path}",
                "Show me {path}",
                "What is in {path}?",
                "Read the file {path}",
            ),
            dev=("Please read {path}",),
            test=("Show me the file {path}", "What is in the file {path}?"),
        ),
        result=lambda rng, slots: {"content": short_text(rng, "train")},
        answer="The file says: {content}",
    ),
    "stock": Family(
        names=Patterns(
            train=("get_stock", "stock_price", "quote", "get_quote"),
            dev=("read_stock",),
            test=("get_stock", "stock_lookup"),
        ),
        descriptions=("Get the price of a stock", "Stock price"),
        arguments={"symbol": Argument(same("symbol", "ticker"), symbol)},
        requests=Patterns(
            train=(
                "What is the stock price of {symbol}?",
                "How is the stock {symbol}?",
                "Stock price of {symbol}",
                "Get the stock of {symbol}.",
            ),
            dev=("Tell me the stock price of {symbol}.",),
            test=("How is the stock {symbol} today?", "What is the price of the stock {symbol}?"),
        ),
        result=lambda rng, slots: {"price": rng.randint(1, 999)},
        answer="The stock {symbol} is at {price}.",
    ),
    "phone": Family(
        names=Patterns(
            train=("get_phone", "find_phone", "phone_book", "lookup_user", "find_user"),
            dev=("read_phone",),
            test=("get_phone", "phone_lookup"),
        ),
        descriptions=("Find the phone number of a person", "Look up a person"),
        arguments={"name": Argument(same("name", "person", "user"), words.name)},
        requests=Patterns(
            train=(
                "What is the phone number of {name}?",
                "Find the number of {name}.",
                "Look up {name}.",
                "I need the phone number of {name}.",
            ),
            dev=("Tell me the number of {name}.",),
            test=("Find the phone number of {name}.", "Look up the number of {name}."),
        ),
        result=lambda rng, slots: {"phone": str(rng.randint(10000, 99999))},
        answer="The number of {name} is {phone}.",
    ),
    "distance": Family(
        names=Patterns(
            train=("get_distance", "distance", "route", "find_route"),
            dev=("read_distance",),
            test=("get_distance", "distance_lookup"),
        ),
        descriptions=("Distance between two cities", "Find the way from a city to a city"),
        arguments={
            "start": Argument(same("from", "start", "origin"), words.city),
            "end": Argument(same("to", "end", "destination"), words.city),
        },
        requests=Patterns(
            train=(
                "How far is it from {start} to {end}?",
                "What is the distance from {start} to {end}?",
                "Distance between {start} and {end}?",
                "Find the way from {start} to {end}.",
            ),
            dev=("What is the distance between {start} and {end}?",),
            test=("How far is {end} from {start}?", "Tell me the distance from {start} to {end}."),
        ),
        result=lambda rng, slots: {"km": rng.randint(10, 2000)},
        answer="It is {km} km from {start} to {end}.",
    ),
    "date": Family(
        names=Patterns(
            train=("get_date", "today", "current_date", "get_day"),
            dev=("read_date",),
            test=("get_date", "date_lookup"),
        ),
        descriptions=("Get the date of today", "Current day"),
        requests=Patterns(
            train=(
                "What day is it?",
                "Which day is today?",
                "What is the date?",
                "Tell me the date.",
            ),
            dev=("What is the day today?",),
            test=("Tell me which day it is.", "What is the date today?"),
        ),
        result=lambda rng, slots: {"day": rng.choice(words.DAYS)},
        answer="Today is {day}.",
    ),
}
