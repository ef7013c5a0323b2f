"""Families of tools that look something up or work something out."""

from __future__ import annotations

from whalepod.tools.tiny.data import words
from whalepod.tools.tiny.data.phrasing import varied
from whalepod.tools.tiny.data.sample import Patterns
from whalepod.tools.tiny.data.tool_family import (
    CITY,
    Argument,
    Family,
    choice,
    found_text,
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
        requests=varied(
            (
                "What is the weather in {city}?", "How is the weather in {city}?",
                "Weather in {city}", "Is it raining in {city}?",
                "What's the weather like in {city}?", "How warm is it in {city}?",
                "Do I need a coat in {city}?", "Is it cold in {city}?",
                "I travel to {city}. How is the weather?", "I am in {city}. Is it raining?",
                "what> the weather in {city}", "what> the weather of {city}",
                "do> check the weather in {city}", "do> get the weather of {city}",
                "do> look up the weather in {city}", "if> how the weather is in {city}",
                "if> how warm it is in {city}", "if> if it rains in {city}",
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
        requests=varied(
            (
                "What time is it in {city}?", "What is the time in {city}?", "Time in {city}?",
                "How late is it in {city}?", "I call someone in {city}. What time is it there?",
                "Which time do they have in {city}?", "what> the time in {city}",
                "what> the clock time in {city}", "do> check the time in {city}",
                "do> get the time of {city}", "if> what time it is in {city}",
                "if> how late it is in {city}",
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
        requests=varied(
            (
                "What is {a} + {b}?", "Use the tool to add {a} and {b}.", "Sum of {a} and {b}?",
                "{a} + {b} = ?", "How much is {a} + {b}?", "I have {a} and {b}. What is the sum?",
                "do> add {a} and {b}", "do> sum up {a} and {b}", "do> calculate {a} + {b}",
                "do> compute {a} + {b}", "do> add the numbers {a} and {b}",
                "what> the sum of {a} and {b}", "what> the result of {a} + {b}", "what> {a} + {b}",
                "if> how much {a} and {b} is", "if> what {a} + {b} is",
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
        requests=varied(
            (
                "Search for {query}.", 'Search the web for "{query}".', "Find {query}.",
                "Look up {query}.", "Please search: {query}", "Search {query}",
                "What do you find about {query}?", "Is there anything about {query}?",
                "say> search {query}", "say> find {query}", "say> search: {query}",
                "do> look up {query}", "do> find {query}", 'do> search "{query}"',
                "do> find pages about {query}", "do> look for {query}",
                "do> search for pages about {query}", "do> start a search for {query}",
                "what> pages about {query}",
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
        requests=varied(
            (
                "Convert {amount} {source} to {target}.",
                "How much is {amount} {source} in {target}?",
                "What are {amount} {source} in {target}?", "{amount} {source} in {target}",
                "I have {amount} {source}. How much is that in {target}?",
                "do> convert {amount} {source} to {target}",
                "do> convert {amount} {source} into {target}",
                "do> change {amount} {source} into {target}",
                "do> exchange {amount} {source} for {target}",
                "do> turn {amount} {source} into {target}", "what> {amount} {source} in {target}",
                "if> how much {amount} {source} is in {target}",
                "if> what {amount} {source} are in {target}",
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
        requests=varied(
            (
                "What does the {item} cost?", "How much is the {item}?",
                "What is the price of the {item}?", "Price of {item}?",
                "I want to buy a {item}. How much is it?",
                "Is the {item} cheap? What does it cost?", "what> the price of the {item}",
                "what> the price for a {item}", "what> the cost of the {item}",
                "do> check the price of the {item}", "do> look up the price of the {item}",
                "if> what the {item} costs", "if> how much the {item} is",
                "if> how much a {item} costs",
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
        requests=varied(
            (
                'Translate "{text}" into {language}.', "Translate into {language}: {text}",
                'What is "{text}" in {language}?', 'How do you say "{text}" in {language}?',
                '"{text}" in {language}?', 'What does "{text}" mean in {language}?',
                'How does one write "{text}" in {language}?',
                'do> translate "{text}" into {language}', 'do> put "{text}" into {language}',
                'do> turn the text "{text}" into {language}', 'do> write "{text}" in {language}',
                "say> translate into {language}: {text}", "say> write in {language}: {text}",
                "say> put into {language}: {text}", 'what> "{text}" in {language}',
                'if> what "{text}" is in {language}', 'if> how to say "{text}" in {language}',
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
        requests=varied(
            (
                "Read {path}.", "Open the file {path}", "Show me {path}", "What is in {path}?",
                "Read the file {path}", "What does {path} say?", "say> read {path}",
                "say> open {path}", "say> open the file {path}", "say> show me {path}",
                "say> print {path}", "say> load the file {path}", "do> read the file {path}",
                "do> open {path}", "do> look into {path}", "what> the text of {path}",
                "what> the content of {path}", "if> what is in {path}", "if> what {path} says",
            ),
            dev=("Please read {path}",),
            test=("Show me the file {path}", "What is in the file {path}?"),
        ),
        result=lambda rng, slots: {"content": found_text(rng)},
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
        requests=varied(
            (
                "What is the stock price of {symbol}?", "How is the stock {symbol}?",
                "Stock price of {symbol}", "How much is one {symbol} stock?",
                "Where is {symbol} now, the stock?", "what> the stock price of {symbol}",
                "what> the price of {symbol}", "what> the quote of {symbol}",
                "do> get the stock of {symbol}", "do> check the stock {symbol}",
                "do> look up the stock {symbol}", "if> how the stock {symbol} is",
                "if> what the stock {symbol} costs",
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
        requests=varied(
            (
                "What is the phone number of {name}?", "How can I call {name}?",
                "I want to call {name}. What is the number?", "do> find the number of {name}",
                "do> look up {name}", "do> find {name} in the phone book",
                "do> get the phone number of {name}", "do> look up how to call {name}",
                "what> the phone number of {name}", "what> {name}'s phone number",
                "what> the number of {name}", "if> which number {name} has",
                "if> how I can call {name}",
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
        requests=varied(
            (
                "How far is it from {start} to {end}?",
                "What is the distance from {start} to {end}?",
                "How many km is it from {start} to {end}?",
                "I go from {start} to {end}. How far is that?", "From {start} to {end}, how far?",
                "How long is the way from {start} to {end}?",
                "do> find the way from {start} to {end}",
                "do> look up the distance from {start} to {end}",
                "do> check the way from {start} to {end}",
                "what> the distance from {start} to {end}", "what> the way from {start} to {end}",
                "what> the km from {start} to {end}", "if> how far it is from {start} to {end}",
                "if> how far {start} is from {end}",
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
        requests=varied(
            (
                "What day is it?", "Which day is today?", "What is the date?",
                "What day do we have today?", "Today is which day?",
                "Is it Monday or what day is it?", "what> the date of today", "what> the date",
                "what> the day of today", "do> check the date", "do> look up the date",
                "if> what day it is", "if> which day is today", "if> what date we have",
            ),
            dev=("What is the day today?",),
            test=("Tell me which day it is.", "What is the date today?"),
        ),
        result=lambda rng, slots: {"day": rng.choice(words.DAYS)},
        answer="Today is {day}.",
    ),
}  # fmt: skip
