"""The kinds of facts that passages tell about people: how each is told, asked and answered."""

from __future__ import annotations

from dataclasses import dataclass

from whalepod.tools.tiny_data.sample import Patterns


@dataclass(frozen=True, slots=True)
class Relation:
    """One kind of fact: how it is told, asked and answered. {n} has it, {v} is the answer."""

    told: Patterns
    asked: Patterns
    answer: str


RELATIONS = {
    "city": Relation(
        told=Patterns(
            train=(
                "{n} lives in {v}.",
                "{n} has a flat in {v}.",
                "The home of {n} is in {v}.",
                "{n} moved to {v} and stayed there.",
                "In {v} lives {n}.",
            ),
            dev=("{n} now lives in {v}.",),
            test=("{n} has a home in {v}.", "These days {n} lives in {v}."),
        ),
        asked=Patterns(
            train=(
                "Where does {n} live?",
                "In which city does {n} live?",
                "What city does {n} live in?",
                "Where is the home of {n}?",
                "Name the city where {n} lives.",
            ),
            dev=("Which city does {n} live in?",),
            test=("Tell me where {n} lives.", "What is the city where {n} lives?"),
        ),
        answer="{n} lives in {v}.",
    ),
    "job": Relation(
        told=Patterns(
            train=(
                "{n} works as a {v}.",
                "{n} is a {v}.",
                "{n} earns money as a {v}.",
                "{n} became a {v} last year.",
                "The work of {n} is that of a {v}.",
            ),
            dev=("{n} has worked as a {v} for years.",),
            test=("{n} works in town as a {v}.", "{n} is happy as a {v}."),
        ),
        asked=Patterns(
            train=(
                "What is the job of {n}?",
                "What does {n} do for work?",
                "What is {n}'s job?",
                "What does {n} work as?",
                "Which job does {n} have?",
            ),
            dev=("What job does {n} have?",),
            test=("Tell me the job of {n}.", "Which work does {n} do?"),
        ),
        answer="{n} is a {v}.",
    ),
    "food": Relation(
        told=Patterns(
            train=(
                "{n} likes {v}.",
                "{n} eats {v} every day.",
                "The favorite food of {n} is {v}.",
                "{n} always orders {v}.",
            ),
            dev=("{n} loves {v} most.",),
            test=("{n} likes to eat {v}.", "Every day {n} orders {v}."),
        ),
        asked=Patterns(
            train=(
                "What does {n} like to eat?",
                "What is {n}'s favorite food?",
                "Which food does {n} like?",
                "What food does {n} like?",
            ),
            dev=("What is the favorite food of {n}?",),
            test=("Tell me which food {n} likes.", "What does {n} like to order?"),
        ),
        answer="{n} likes {v}.",
    ),
    "color": Relation(
        told=Patterns(
            train=(
                "{n} has a {v} {t}.",
                "The {t} of {n} is {v}.",
                "{n} bought a {v} {t}.",
                "{n}'s {t} is {v}.",
            ),
            dev=("{n} owns a {v} {t}.",),
            test=("{n} carries a {v} {t}.", "{n} found a {v} {t} last year."),
        ),
        asked=Patterns(
            train=(
                "What color is {n}'s {t}?",
                "What is the color of {n}'s {t}?",
                "Which color does the {t} of {n} have?",
                "What color is the {t} of {n}?",
            ),
            dev=("Which color is {n}'s {t}?",),
            test=("Tell me the color of {n}'s {t}.", "What color does {n}'s {t} have?"),
        ),
        answer="{n}'s {t} is {v}.",
    ),
    "count": Relation(
        told=Patterns(
            train=(
                "{n} has {v} {ts}.",
                "{n} owns {v} {ts}.",
                "{n} keeps {v} {ts} at home.",
                "In a box {n} has {v} {ts}.",
            ),
            dev=("{n} bought {v} {ts}.",),
            test=("At home {n} has {v} {ts}.", "{n} found {v} {ts}."),
        ),
        asked=Patterns(
            train=(
                "How many {ts} does {n} have?",
                "How many {ts} does {n} own?",
                "What number of {ts} does {n} have?",
                "Say how many {ts} {n} has.",
            ),
            dev=("How many {ts} are {n}'s?",),
            test=("Tell me how many {ts} {n} has.", "How many {ts} does {n} keep?"),
        ),
        answer="{n} has {v} {ts}.",
    ),
    "pet": Relation(
        told=Patterns(
            train=(
                "{n} has a {p} called {v}.",
                "{n}'s {p} is called {v}.",
                "The {p} of {n} is named {v}.",
                "{n} walks with a {p} named {v}.",
            ),
            dev=("{n} owns a {p} named {v}.",),
            test=("{n} lives with a {p} called {v}.", "The name of {n}'s {p} is {v}."),
        ),
        asked=Patterns(
            train=(
                "What is the name of {n}'s {p}?",
                "What is {n}'s {p} called?",
                "How is the {p} of {n} called?",
                "What name does {n}'s {p} have?",
            ),
            dev=("What is the {p} of {n} called?",),
            test=("Tell me the name of {n}'s {p}.", "Which name does the {p} of {n} have?"),
        ),
        answer="{n}'s {p} is called {v}.",
    ),
    "day": Relation(
        told=Patterns(
            train=(
                "{n} travels on {v}.",
                "{n} leaves on {v}.",
                "On {v} {n} takes the train.",
                "The trip of {n} starts on {v}.",
            ),
            dev=("{n} starts the trip on {v}.",),
            test=("On {v} {n} travels.", "{n} takes the train on {v}."),
        ),
        asked=Patterns(
            train=(
                "When does {n} travel?",
                "On which day does {n} travel?",
                "What day does {n} leave?",
                "When does the trip of {n} start?",
            ),
            dev=("Which day does {n} travel?",),
            test=("Tell me when {n} travels.", "On what day does {n} leave?"),
        ),
        answer="{n} travels on {v}.",
    ),
    "code": Relation(
        told=Patterns(
            train=(
                "The code of {n} is {v}.",
                "{n} uses the code {v}.",
                "{n}'s code is {v}.",
                "The number {v} is the code of {n}.",
            ),
            dev=("The code for {n} is {v}.",),
            test=("{n} has the code {v}.", "The code that {n} uses is {v}."),
        ),
        asked=Patterns(
            train=(
                "What is the code of {n}?",
                "Which code does {n} use?",
                "What is {n}'s code?",
                "Give me the code of {n}.",
            ),
            dev=("What code does {n} have?",),
            test=("Tell me the code of {n}.", "What code does {n} use?"),
        ),
        answer="The code of {n} is {v}.",
    ),
}
