from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from whalepod.server.gateway.stops import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=24)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def run(pieces: list[str], stops: list[str], include_stop: bool = False) -> tuple[list[str], str]:
    """Return the delivered pieces and the stop string, or "" when none came."""
    matcher = StopMatcher(stops, include_stop)
    delivered = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        delivered.append(text)
        if stop is not None:
            return delivered, stop
    return [*delivered, matcher.flush()], ""


def expected(text: str, stops: list[str]) -> tuple[str, str]:
    """The stop string that is complete first, the longest of those that end there."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, ""


@given(text=LETTERS, stops=STOPS, data=st.data())
def test_every_cut_stops_at_the_same_place(
    text: str, stops: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]

    delivered, stop = run(pieces, stops)

    assert ("".join(delivered), stop) == expected(text, stops)


@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    delivered = ""
    for i, letter in enumerate(text):
        piece, stop = matcher.push(letter)
        if stop is not None:
            return
        delivered += piece
        held = text[len(delivered) : i + 1]
        assert held == "" or any(s.startswith(held) for s in stops)


def test_short_texts_and_stop_strings_all_match_as_expected() -> None:
    words = ["".join(w) for n in range(1, 8) for w in itertools.product("ab", repeat=n)]
    for stop in [word for word in words if len(word) <= 4]:
        for text in words:
            delivered, found = run(list(text), [stop])
            assert ("".join(delivered), found) == expected(text, [stop]), (text, stop)


def test_b051_nothing_of_a_stop_string_is_delivered() -> None:
    assert run(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]) == (
        ["ABC", "", "", "", ""],
        "DEFGHIJ",
    )


def test_b053_text_that_begins_no_stop_string_is_not_delayed() -> None:
    assert run(["one ", "two ", "three"], ["zzzz"]) == (["one ", "two ", "three", ""], "")


def test_the_stop_string_itself_is_delivered_on_request() -> None:
    assert run(["a S", "T b"], ["ST"], include_stop=True) == (["a ", "ST"], "ST")
