"""The closed world of the embedded model: names, places and things, with held-out ones apart."""

from __future__ import annotations

import random

from whalepod.tools.tiny.data.sample import Split


def listed(words: str) -> list[str]:
    """Split a block of words at white space."""
    return words.split()


NAMES: dict[Split, list[str]] = {
    "train": listed(
        """
        Ada Alan Alice Amir Ana Anders Anna Ben Bela Bruno Carla Carlos Chen Clara Dan Dana
        Daria David Diego Dora Edgar Ella Elena Emil Emma Erik Eva Fatima Felix Finn Frida Gina
        Goran Greta Hana Hans Henry Hugo Ida Igor Ines Irma Ivan Jack Jana Jin John Jonas Jose
        Julia Karin Karl Kate Kim Lars Laura Lea Leo Lena Liam Lina Linda Lucas Lucy Maja Malik
        Marco Maria Marta Mary Max Mei Mia Milo Mina Nadia Nina Noah Nora Olga Oscar Otto Pablo
        Paul Pedro Petra Ravi Rita Robin Rosa Ruth Sam Sara Selma Sofia Sven Tara Tom Uma Vera
        Victor Wanda Yara Yusuf Zoe Peter Susan Mark Lisa Bob Eve Grace Helen Simon Theo Boris
        Celia
        """
    ),
    "dev": listed(
        """
        Lorin Elina Marlon Tina Silas Ronja Jorin Adele Corin Livia
        """
    ),
    "test": listed(
        """
        Marina Tobin Selina Leona Dorian Martin Karina Alina Rosalin Emilia Samir Tomas Verena
        Roman Janis Elias Romina Nadine Sandro Marius
        """
    ),
}
"""Held-out names are other words, spelled with pieces that training names have too."""

CITIES: dict[Split, list[str]] = {
    "train": listed(
        """
        Paris Rome Oslo Berlin Madrid London Tokyo Vienna Athens Lisbon Dublin Prague Warsaw
        Cairo Delhi Lima Seoul Beijing Moscow Boston Chicago Denver Dallas Toronto Sydney Milan
        Lyon Porto Turin Basel Bern Geneva Hamburg Bremen Bonn Dresden Krakow Riga Tallinn
        Vilnius Helsinki Stockholm Bergen Malmo Copenhagen Brussels Ghent Nairobi Lagos Accra
        Bogota Quito Havana Mumbai Osaka Kyoto Perth Seattle Austin Miami Ankara Budapest
        """
    ),
    "dev": listed(
        """
        Bari Lodi Varna Salta Nara
        """
    ),
    "test": listed(
        """
        Linden Parma Halden Siena Dover Lund Tampa Leon Toulon Denton
        """
    ),
}

COLORS = listed("red blue green yellow black white brown pink grey orange")
ANIMALS = listed("dog cat horse rabbit parrot goat duck hamster pony whale")
THINGS = listed(
    """
    apple book stamp coin shell pencil chair lamp plate button stone ticket candle box bottle
    card key map bag cup hat ball boat bike coat scarf ring clock basket letter
    """
)
FOODS = listed(
    """
    bread cheese soup rice pasta fish cake honey pizza salad tea coffee milk beans corn
    """
)
JOBS = listed(
    """
    teacher doctor baker farmer pilot painter sailor nurse cook driver lawyer singer writer
    dentist gardener builder judge waiter plumber tailor
    """
)
DAYS = listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
LANGUAGES = listed(
    """
    French German Spanish Italian Dutch Greek Polish Turkish Swedish Danish
    """
)
PLACES = listed(
    """
    library garden station market school museum harbor hotel office bakery castle shop
    """
)
_ONSETS = listed("b c d f g h j k l m n p r s t v w z br dr gr kr tr st sh ch fl pl")
_VOWELS = listed("a e i o u ia ei ou")
_CODAS = ["", "", "", "n", "r", "l", "s", "m", "nd", "rt", "x", "k"]


def made_up_word(rng: random.Random, syllables: int = 2) -> str:
    """Invent a word that can be said, so that copying is learnt and not a list of names."""
    parts = [rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)]
    return "".join(parts) + rng.choice(_CODAS)


def _blend(rng: random.Random, listed: dict[Split, list[str]]) -> str:
    """Join the head of one training word to the tail of another: new words of familiar pieces."""
    while True:
        first, second = rng.sample(listed["train"], 2)
        word = first[: rng.choice((2, 3, 4))] + second[-rng.choice((2, 3, 4)) :].lower()
        if word not in listed["dev"] and word not in listed["test"]:
            return word


def any_name(rng: random.Random) -> str:
    if rng.random() < 0.45:
        return made_up_word(rng, rng.choice((1, 2, 2, 2))).capitalize()
    return rng.choice(NAMES["train"])


def any_city(rng: random.Random) -> str:
    return made_up_word(rng).capitalize() if rng.random() < 0.4 else rng.choice(CITIES["train"])


def name(rng: random.Random, split: Split) -> str:
    draw = rng.random() if split == "train" else 1.0
    if draw < 0.25:
        return made_up_word(rng, rng.choice((1, 2, 2, 2))).capitalize()
    return _blend(rng, NAMES) if draw < 0.55 else rng.choice(NAMES[split])


def names(rng: random.Random, split: Split, count: int) -> list[str]:
    """Draw different names."""
    found: list[str] = []
    while len(found) < count:
        candidate = name(rng, split)
        if candidate not in found:
            found.append(candidate)
    return found


def city(rng: random.Random, split: Split) -> str:
    draw = rng.random() if split == "train" else 1.0
    if draw < 0.25:
        return made_up_word(rng).capitalize()
    return _blend(rng, CITIES) if draw < 0.5 else rng.choice(CITIES[split])


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith(("sh", "x", "s")) else "s")


def number_split(first: int, second: int) -> Split:
    """Say which split a pair of numbers belongs to, whatever the order of the two.

    A fixed mix of the pair, not Python's hash: the same for every process and version.
    """
    low, high = sorted((first, second))
    mixed = (low * 7919 + high * 104729 + low * high * 31) % 1009 % 20
    return "test" if mixed < 2 else "dev" if mixed == 2 else "train"


def number_pair(rng: random.Random, split: Split, low: int = 10, high: int = 99) -> tuple[int, int]:
    """Draw two numbers of `split`."""
    while True:
        pair = rng.randint(low, high), rng.randint(low, high)
        if number_split(*pair) == split:
            return pair
