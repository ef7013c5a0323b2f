"""More kinds of facts for the training passages; held-out passages tell none of these."""

from __future__ import annotations

from whalepod.tools.tiny_data.phrasing import varied
from whalepod.tools.tiny_data.relations import Relation

MORE_RELATIONS: dict[str, tuple[str, Relation]] = {
    "birthplace": (
        "place",
        Relation(
            told=varied(
                (
                    "{n} was born in {v}.",
                    "{n} comes from {v}.",
                    "{n} grew up in {v}.",
                    "The birthplace of {n} is {v}.",
                    "{n} spent the first years in {v}.",
                    "As a child {n} lived in {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Where was {n} born?",
                    "Where does {n} come from?",
                    "Where did {n} grow up?",
                    "Which city does {n} come from?",
                    "what> the birthplace of {n}",
                    "what> {n}'s birthplace",
                    "if> where {n} was born",
                    "if> where {n} comes from",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} comes from {v}.",
        ),
    ),
    "visit": (
        "place",
        Relation(
            told=varied(
                (
                    "{n} visited {v}.",
                    "{n} was in {v} for a week.",
                    "{n} took a trip to {v}.",
                    "{n} saw {v} last summer.",
                    "{n} spent a day in {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Which city did {n} visit?",
                    "Where was {n} for a week?",
                    "What did {n} visit?",
                    "Where did {n} go?",
                    "what> the city that {n} visited",
                    "if> which city {n} visited",
                    "if> where {n} went",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} visited {v}.",
        ),
    ),
    "age": (
        "years",
        Relation(
            told=varied(
                (
                    "{n} is {v} years old.",
                    "{n} turned {v} today.",
                    "The age of {n} is {v}.",
                    "{n} is now {v}.",
                    "At {v} years {n} is still happy.",
                    "{n} has lived for {v} years.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "How old is {n}?",
                    "What is the age of {n}?",
                    "What is {n}'s age?",
                    "{n} is how old?",
                    "How many years old is {n}?",
                    "what> the age of {n}",
                    "what> {n}'s age",
                    "if> how old {n} is",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} is {v} years old.",
        ),
    ),
    "friend": (
        "name",
        Relation(
            told=varied(
                (
                    "{n} is a friend of {v}.",
                    "The best friend of {n} is {v}.",
                    "{n} has a friend called {v}.",
                    "{n} and a friend named {v} play chess.",
                    "{n}'s friend is {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Who is the friend of {n}?",
                    "Who is {n}'s best friend?",
                    "What is {n}'s friend called?",
                    "Which friend does {n} have?",
                    "what> the name of {n}'s friend",
                    "what> the friend of {n}",
                    "if> who the friend of {n} is",
                    "if> who {n}'s friend is",
                ),
                dev=(),
                test=(),
            ),
            answer="The friend of {n} is {v}.",
        ),
    ),
    "sister": (
        "name",
        Relation(
            told=varied(
                (
                    "{n} has a sister named {v}.",
                    "The sister of {n} is {v}.",
                    "{n}'s sister is called {v}.",
                    "{v} is the sister of {n}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Who is the sister of {n}?",
                    "What is {n}'s sister called?",
                    "What is the name of {n}'s sister?",
                    "what> the name of {n}'s sister",
                    "what> the sister of {n}",
                    "if> who {n}'s sister is",
                    "if> what {n}'s sister is called",
                ),
                dev=(),
                test=(),
            ),
            answer="The sister of {n} is {v}.",
        ),
    ),
    "brother": (
        "name",
        Relation(
            told=varied(
                (
                    "{n} has a brother named {v}.",
                    "The brother of {n} is {v}.",
                    "{n}'s brother is called {v}.",
                    "{v} is the brother of {n}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Who is the brother of {n}?",
                    "What is {n}'s brother called?",
                    "What is the name of {n}'s brother?",
                    "what> the name of {n}'s brother",
                    "what> the brother of {n}",
                    "if> who {n}'s brother is",
                    "if> what {n}'s brother is called",
                ),
                dev=(),
                test=(),
            ),
            answer="The brother of {n} is {v}.",
        ),
    ),
    "teacher": (
        "name",
        Relation(
            told=varied(
                (
                    "{n} learns from {v}.",
                    "The teacher of {n} is {v}.",
                    "{n} goes to school to {v}.",
                    "{v} teaches {n}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Who teaches {n}?",
                    "Who is the teacher of {n}?",
                    "From whom does {n} learn?",
                    "what> the teacher of {n}",
                    "what> the name of {n}'s teacher",
                    "if> who teaches {n}",
                    "if> who the teacher of {n} is",
                ),
                dev=(),
                test=(),
            ),
            answer="{v} teaches {n}.",
        ),
    ),
    "neighbor": (
        "name",
        Relation(
            told=varied(
                (
                    "{n} lives next to {v}.",
                    "The neighbor of {n} is {v}.",
                    "Next door to {n} lives {v}.",
                    "{n} has a neighbor called {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Who lives next to {n}?",
                    "Who is the neighbor of {n}?",
                    "What is {n}'s neighbor called?",
                    "what> the neighbor of {n}",
                    "what> the name of {n}'s neighbor",
                    "if> who lives next to {n}",
                ),
                dev=(),
                test=(),
            ),
            answer="{v} lives next to {n}.",
        ),
    ),
    "letter": (
        "name",
        Relation(
            told=varied(
                (
                    "{n} wrote a letter to {v}.",
                    "A letter from {n} came to {v}.",
                    "{n} sent {v} a letter.",
                    "{v} got a letter from {n}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "To whom did {n} write?",
                    "Who got a letter from {n}?",
                    "Whom did {n} send a letter?",
                    "what> the name of the one that {n} wrote to",
                    "if> who got the letter from {n}",
                    "if> to whom {n} wrote",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} wrote to {v}.",
        ),
    ),
    "room": (
        "number",
        Relation(
            told=varied(
                (
                    "{n} sleeps in room {v}.",
                    "The room of {n} is number {v}.",
                    "{n} stays in room {v}.",
                    "{n} has room {v}.",
                    "Room {v} is for {n}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "In which room does {n} sleep?",
                    "What is the room of {n}?",
                    "Which room does {n} have?",
                    "Which room is for {n}?",
                    "what> the room of {n}",
                    "what> {n}'s room number",
                    "what> the room number of {n}",
                    "if> which room {n} has",
                    "if> in which room {n} sleeps",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} has room {v}.",
        ),
    ),
    "phone": (
        "number",
        Relation(
            told=varied(
                (
                    "The phone number of {n} is {v}.",
                    "You can call {n} at {v}.",
                    "{n} has the phone number {v}.",
                    "Call {v} to talk to {n}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What is the phone number of {n}?",
                    "How can I call {n}?",
                    "what> the phone number of {n}",
                    "what> {n}'s phone number",
                    "if> which phone number {n} has",
                ),
                dev=(),
                test=(),
            ),
            answer="The number of {n} is {v}.",
        ),
    ),
    "pay": (
        "number",
        Relation(
            told=varied(
                (
                    "{n} paid {v} coins.",
                    "{n} gave {v} coins for it.",
                    "It cost {n} {v} coins.",
                    "{n} had to pay {v} coins.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "How much did {n} pay?",
                    "How many coins did {n} pay?",
                    "What did {n} pay?",
                    "what> the price that {n} paid",
                    "if> how much {n} paid",
                    "if> how many coins {n} paid",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} paid {v} coins.",
        ),
    ),
    "points": (
        "number",
        Relation(
            told=varied(
                (
                    "{n} won {v} points.",
                    "{n} has {v} points.",
                    "The score of {n} is {v}.",
                    "With {v} points {n} was happy.",
                    "{n} got {v} points in the game.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "How many points does {n} have?",
                    "What is the score of {n}?",
                    "What is {n}'s score?",
                    "How many points did {n} win?",
                    "what> the score of {n}",
                    "what> {n}'s score",
                    "if> how many points {n} has",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} has {v} points.",
        ),
    ),
    "lost": (
        "thing",
        Relation(
            told=varied(
                (
                    "{n} lost a {v}.",
                    "The {v} of {n} is gone.",
                    "{n} cannot find the {v}.",
                    "{n} is looking for a {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What did {n} lose?",
                    "What is {n} looking for?",
                    "What can {n} not find?",
                    "what> the thing that {n} lost",
                    "if> what {n} lost",
                    "if> what {n} is looking for",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} lost a {v}.",
        ),
    ),
    "gift": (
        "thing",
        Relation(
            told=varied(
                (
                    "{n} got a {v} as a gift.",
                    "As a gift {n} got a {v}.",
                    "Someone gave {n} a {v}.",
                    "The gift for {n} was a {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What did {n} get as a gift?",
                    "What was the gift for {n}?",
                    "Which gift did {n} get?",
                    "what> the gift for {n}",
                    "what> {n}'s gift",
                    "if> what gift {n} got",
                    "if> which gift {n} got",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} got a {v}.",
        ),
    ),
    "shopping": (
        "thing",
        Relation(
            told=varied(
                (
                    "{n} went out to buy a {v}.",
                    "{n} needs a new {v}.",
                    "{n} wants to buy a {v}.",
                    "{n} ordered a {v} in the shop.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What does {n} need?",
                    "What does {n} want to buy?",
                    "what> the thing that {n} needs",
                    "if> what {n} needs",
                    "if> what {n} wants to buy",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} wants to buy a {v}.",
        ),
    ),
    "work place": (
        "spot",
        Relation(
            told=varied(
                (
                    "{n} works at the {v}.",
                    "The {v} is where {n} works.",
                    "{n} has an office in the {v}.",
                    "Every morning {n} goes to work at the {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Where does {n} work?",
                    "At which place does {n} work?",
                    "what> the place where {n} works",
                    "if> where {n} works",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} works at the {v}.",
        ),
    ),
    "meeting": (
        "spot",
        Relation(
            told=varied(
                (
                    "{n} waits at the {v}.",
                    "You meet {n} at the {v}.",
                    "{n} stands in front of the {v}.",
                    "{n} was seen at the {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Where does {n} wait?",
                    "Where do we meet {n}?",
                    "Where was {n} seen?",
                    "what> the place where {n} waits",
                    "if> where {n} waits",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} is at the {v}.",
        ),
    ),
    "language": (
        "language",
        Relation(
            told=varied(
                (
                    "{n} speaks {v}.",
                    "{n} learns {v}.",
                    "The language of {n} is {v}.",
                    "{n} talks in {v}.",
                    "At home {n} speaks {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "Which language does {n} speak?",
                    "What does {n} speak?",
                    "What language does {n} learn?",
                    "what> the language of {n}",
                    "what> {n}'s language",
                    "if> which language {n} speaks",
                    "if> what {n} speaks",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} speaks {v}.",
        ),
    ),
    "birthday": (
        "day",
        Relation(
            told=varied(
                (
                    "The birthday of {n} is on {v}.",
                    "{n} has a birthday on {v}.",
                    "On {v} we sing for {n}.",
                    "{n}'s birthday is {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "When is {n}'s birthday?",
                    "On which day is the birthday of {n}?",
                    "When do we sing for {n}?",
                    "what> the birthday of {n}",
                    "what> {n}'s birthday",
                    "if> when {n} has a birthday",
                    "if> when the birthday of {n} is",
                ),
                dev=(),
                test=(),
            ),
            answer="The birthday of {n} is on {v}.",
        ),
    ),
    "drink": (
        "drink",
        Relation(
            told=varied(
                (
                    "{n} drinks {v}.",
                    "{n} wants a cup of {v}.",
                    "The drink of {n} is {v}.",
                    "{n} asked for a glass of {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What does {n} drink?",
                    "What is the drink of {n}?",
                    "Which drink does {n} want?",
                    "what> the drink of {n}",
                    "what> {n}'s drink",
                    "if> what {n} drinks",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} drinks {v}.",
        ),
    ),
    "sport": (
        "sport",
        Relation(
            told=varied(
                (
                    "{n} plays {v}.",
                    "{n} is good at {v}.",
                    "The sport of {n} is {v}.",
                    "After work {n} plays {v}.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What does {n} play?",
                    "Which game does {n} play?",
                    "What is {n} good at?",
                    "what> the sport of {n}",
                    "what> {n}'s game",
                    "if> what {n} plays",
                ),
                dev=(),
                test=(),
            ),
            answer="{n} plays {v}.",
        ),
    ),
    "secret": (
        "word",
        Relation(
            told=varied(
                (
                    "The secret word of {n} is {v}.",
                    "{n} uses the word {v} as a key.",
                    "{n} whispers {v}.",
                    "{v} is the word of {n}.",
                    "{n} says {v} again and again.",
                ),
                dev=(),
                test=(),
            ),
            asked=varied(
                (
                    "What is the secret word of {n}?",
                    "Which word does {n} use?",
                    "What does {n} say?",
                    "what> the word of {n}",
                    "what> {n}'s secret word",
                    "if> which word {n} uses",
                    "if> what {n} says",
                ),
                dev=(),
                test=(),
            ),
            answer="The word of {n} is {v}.",
        ),
    ),
}
"""By name: which values fill {v}, and the relation."""
