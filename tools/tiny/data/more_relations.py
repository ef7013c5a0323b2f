"""More kinds of facts for the training passages; held-out passages tell none of these."""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.tools.tiny.data.phrasing import varied
from whalepod.tools.tiny.data.relations import Relation


def _relation(
    values: str, answer: str, told: Sequence[str], asked: Sequence[str]
) -> tuple[str, Relation]:
    relation = Relation(
        told=varied(told, dev=(), test=()), asked=varied(asked, dev=(), test=()), answer=answer
    )
    return values, relation


MORE_RELATIONS: dict[str, tuple[str, Relation]] = {
    "birthplace": _relation(
        "place", "{n} comes from {v}.",
        (
            "{n} was born in {v}.", "{n} comes from {v}.", "{n} grew up in {v}.",
            "The birthplace of {n} is {v}.", "{n} spent the first years in {v}.",
            "As a child {n} lived in {v}.",
        ),
        (
            "Where was {n} born?", "Where does {n} come from?", "Where did {n} grow up?",
            "Which city does {n} come from?", "what> the birthplace of {n}",
            "what> {n}'s birthplace", "if> where {n} was born", "if> where {n} comes from",
        ),
    ),
    "visit": _relation(
        "place", "{n} visited {v}.",
        (
            "{n} visited {v}.", "{n} was in {v} for a week.", "{n} took a trip to {v}.",
            "{n} saw {v} last summer.", "{n} spent a day in {v}.",
        ),
        (
            "Which city did {n} visit?", "Where was {n} for a week?", "What did {n} visit?",
            "Where did {n} go?", "what> the city that {n} visited", "if> which city {n} visited",
            "if> where {n} went",
        ),
    ),
    "age": _relation(
        "years", "{n} is {v} years old.",
        (
            "{n} is {v} years old.", "{n} turned {v} today.", "The age of {n} is {v}.",
            "{n} is now {v}.", "At {v} years {n} is still happy.", "{n} has lived for {v} years.",
        ),
        (
            "How old is {n}?", "What is the age of {n}?", "What is {n}'s age?", "{n} is how old?",
            "How many years old is {n}?", "what> the age of {n}", "what> {n}'s age",
            "if> how old {n} is",
        ),
    ),
    "friend": _relation(
        "name", "The friend of {n} is {v}.",
        (
            "{n} is a friend of {v}.", "The best friend of {n} is {v}.",
            "{n} has a friend called {v}.", "{n} and a friend named {v} play chess.",
            "{n}'s friend is {v}.",
        ),
        (
            "Who is the friend of {n}?", "Who is {n}'s best friend?",
            "What is {n}'s friend called?", "Which friend does {n} have?",
            "what> the name of {n}'s friend", "what> the friend of {n}",
            "if> who the friend of {n} is", "if> who {n}'s friend is",
        ),
    ),
    "sister": _relation(
        "name", "The sister of {n} is {v}.",
        (
            "{n} has a sister named {v}.", "The sister of {n} is {v}.",
            "{n}'s sister is called {v}.", "{v} is the sister of {n}.",
        ),
        (
            "Who is the sister of {n}?", "What is {n}'s sister called?",
            "What is the name of {n}'s sister?", "what> the name of {n}'s sister",
            "what> the sister of {n}", "if> who {n}'s sister is", "if> what {n}'s sister is called",
        ),
    ),
    "brother": _relation(
        "name", "The brother of {n} is {v}.",
        (
            "{n} has a brother named {v}.", "The brother of {n} is {v}.",
            "{n}'s brother is called {v}.", "{v} is the brother of {n}.",
        ),
        (
            "Who is the brother of {n}?", "What is {n}'s brother called?",
            "What is the name of {n}'s brother?", "what> the name of {n}'s brother",
            "what> the brother of {n}", "if> who {n}'s brother is",
            "if> what {n}'s brother is called",
        ),
    ),
    "teacher": _relation(
        "name", "{v} teaches {n}.",
        (
            "{n} learns from {v}.", "The teacher of {n} is {v}.", "{n} goes to school to {v}.",
            "{v} teaches {n}.",
        ),
        (
            "Who teaches {n}?", "Who is the teacher of {n}?", "From whom does {n} learn?",
            "what> the teacher of {n}", "what> the name of {n}'s teacher", "if> who teaches {n}",
            "if> who the teacher of {n} is",
        ),
    ),
    "neighbor": _relation(
        "name", "{v} lives next to {n}.",
        (
            "{n} lives next to {v}.", "The neighbor of {n} is {v}.", "Next door to {n} lives {v}.",
            "{n} has a neighbor called {v}.",
        ),
        (
            "Who lives next to {n}?", "Who is the neighbor of {n}?",
            "What is {n}'s neighbor called?", "what> the neighbor of {n}",
            "what> the name of {n}'s neighbor", "if> who lives next to {n}",
        ),
    ),
    "letter": _relation(
        "name", "{n} wrote to {v}.",
        (
            "{n} wrote a letter to {v}.", "A letter from {n} came to {v}.",
            "{n} sent {v} a letter.", "{v} got a letter from {n}.",
        ),
        (
            "To whom did {n} write?", "Who got a letter from {n}?", "Whom did {n} send a letter?",
            "what> the name of the one that {n} wrote to", "if> who got the letter from {n}",
            "if> to whom {n} wrote",
        ),
    ),
    "room": _relation(
        "number", "{n} has room {v}.",
        (
            "{n} sleeps in room {v}.", "The room of {n} is number {v}.", "{n} stays in room {v}.",
            "{n} has room {v}.", "Room {v} is for {n}.",
        ),
        (
            "In which room does {n} sleep?", "What is the room of {n}?",
            "Which room does {n} have?", "Which room is for {n}?", "what> the room of {n}",
            "what> {n}'s room number", "what> the room number of {n}", "if> which room {n} has",
            "if> in which room {n} sleeps",
        ),
    ),
    "phone": _relation(
        "number", "The number of {n} is {v}.",
        (
            "The phone number of {n} is {v}.", "You can call {n} at {v}.",
            "{n} has the phone number {v}.", "Call {v} to talk to {n}.",
        ),
        (
            "What is the phone number of {n}?", "How can I call {n}?",
            "what> the phone number of {n}", "what> {n}'s phone number",
            "if> which phone number {n} has",
        ),
    ),
    "pay": _relation(
        "number", "{n} paid {v} coins.",
        (
            "{n} paid {v} coins.", "{n} gave {v} coins for it.", "It cost {n} {v} coins.",
            "{n} had to pay {v} coins.",
        ),
        (
            "How much did {n} pay?", "How many coins did {n} pay?", "What did {n} pay?",
            "what> the price that {n} paid", "if> how much {n} paid", "if> how many coins {n} paid",
        ),
    ),
    "points": _relation(
        "number", "{n} has {v} points.",
        (
            "{n} won {v} points.", "{n} has {v} points.", "The score of {n} is {v}.",
            "With {v} points {n} was happy.", "{n} got {v} points in the game.",
        ),
        (
            "How many points does {n} have?", "What is the score of {n}?", "What is {n}'s score?",
            "How many points did {n} win?", "what> the score of {n}", "what> {n}'s score",
            "if> how many points {n} has",
        ),
    ),
    "lost": _relation(
        "thing", "{n} lost a {v}.",
        (
            "{n} lost a {v}.", "The {v} of {n} is gone.", "{n} cannot find the {v}.",
            "{n} is looking for a {v}.",
        ),
        (
            "What did {n} lose?", "What is {n} looking for?", "What can {n} not find?",
            "what> the thing that {n} lost", "if> what {n} lost", "if> what {n} is looking for",
        ),
    ),
    "gift": _relation(
        "thing", "{n} got a {v}.",
        (
            "{n} got a {v} as a gift.", "As a gift {n} got a {v}.", "Someone gave {n} a {v}.",
            "The gift for {n} was a {v}.",
        ),
        (
            "What did {n} get as a gift?", "What was the gift for {n}?", "Which gift did {n} get?",
            "what> the gift for {n}", "what> {n}'s gift", "if> what gift {n} got",
            "if> which gift {n} got",
        ),
    ),
    "shopping": _relation(
        "thing", "{n} wants to buy a {v}.",
        (
            "{n} went out to buy a {v}.", "{n} needs a new {v}.", "{n} wants to buy a {v}.",
            "{n} ordered a {v} in the shop.",
        ),
        (
            "What does {n} need?", "What does {n} want to buy?", "what> the thing that {n} needs",
            "if> what {n} needs", "if> what {n} wants to buy",
        ),
    ),
    "work place": _relation(
        "spot", "{n} works at the {v}.",
        (
            "{n} works at the {v}.", "The {v} is where {n} works.", "{n} has an office in the {v}.",
            "Every morning {n} goes to work at the {v}.",
        ),
        (
            "Where does {n} work?", "At which place does {n} work?",
            "what> the place where {n} works", "if> where {n} works",
        ),
    ),
    "meeting": _relation(
        "spot", "{n} is at the {v}.",
        (
            "{n} waits at the {v}.", "You meet {n} at the {v}.", "{n} stands in front of the {v}.",
            "{n} was seen at the {v}.",
        ),
        (
            "Where does {n} wait?", "Where do we meet {n}?", "Where was {n} seen?",
            "what> the place where {n} waits", "if> where {n} waits",
        ),
    ),
    "language": _relation(
        "language", "{n} speaks {v}.",
        (
            "{n} speaks {v}.", "{n} learns {v}.", "The language of {n} is {v}.",
            "{n} talks in {v}.", "At home {n} speaks {v}.",
        ),
        (
            "Which language does {n} speak?", "What does {n} speak?",
            "What language does {n} learn?", "what> the language of {n}", "what> {n}'s language",
            "if> which language {n} speaks", "if> what {n} speaks",
        ),
    ),
    "birthday": _relation(
        "day", "The birthday of {n} is on {v}.",
        (
            "The birthday of {n} is on {v}.", "{n} has a birthday on {v}.",
            "On {v} we sing for {n}.", "{n}'s birthday is {v}.",
        ),
        (
            "When is {n}'s birthday?", "On which day is the birthday of {n}?",
            "When do we sing for {n}?", "what> the birthday of {n}", "what> {n}'s birthday",
            "if> when {n} has a birthday", "if> when the birthday of {n} is",
        ),
    ),
    "drink": _relation(
        "drink", "{n} drinks {v}.",
        (
            "{n} drinks {v}.", "{n} wants a cup of {v}.", "The drink of {n} is {v}.",
            "{n} asked for a glass of {v}.",
        ),
        (
            "What does {n} drink?", "What is the drink of {n}?", "Which drink does {n} want?",
            "what> the drink of {n}", "what> {n}'s drink", "if> what {n} drinks",
        ),
    ),
    "sport": _relation(
        "sport", "{n} plays {v}.",
        (
            "{n} plays {v}.", "{n} is good at {v}.", "The sport of {n} is {v}.",
            "After work {n} plays {v}.",
        ),
        (
            "What does {n} play?", "Which game does {n} play?", "What is {n} good at?",
            "what> the sport of {n}", "what> {n}'s game", "if> what {n} plays",
        ),
    ),
    "secret": _relation(
        "word", "The word of {n} is {v}.",
        (
            "The secret word of {n} is {v}.", "{n} uses the word {v} as a key.",
            "{n} whispers {v}.", "{v} is the word of {n}.", "{n} says {v} again and again.",
        ),
        (
            "What is the secret word of {n}?", "Which word does {n} use?", "What does {n} say?",
            "what> the word of {n}", "what> {n}'s secret word", "if> which word {n} uses",
            "if> what {n} says",
        ),
    ),
}  # fmt: skip
"""By name: which values fill {v}, and the relation."""
