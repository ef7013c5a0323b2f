"""An answer falls into the same blocks however it is cut."""

from __future__ import annotations

from whalepod.server.gateway.blocks import (
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockReader,
    BlockStarted,
    blocks_of,
)
from whalepod.server.gateway.events import Choice, TextDelta
from whalepod.server.gateway.families.interface import (
    ToolArguments,
    ToolCallEnded,
    ToolCallStarted,
)

CALL = ToolCallStarted(index=0, id="call_1", name="w")


def short(event: BlockEvent) -> tuple[object, ...]:
    match event:
        case BlockStarted(block=block):
            return "start", block.index, block.kind
        case BlockGrew(block=block, text=text):
            return "text", block.index, text
        case BlockEnded(block=block):
            return "end", block.index, block.is_complete


def read(*deltas: TextDelta, reason: str = "stop") -> list[tuple[object, ...]]:
    reader = BlockReader()
    events = [short(event) for delta in deltas for event in reader.push(delta)]
    events += [short(event) for event in reader.finish(reason)]
    choice = Choice(0, finish_reason=reason)
    for delta in deltas:
        choice.add(delta)
    folded = blocks_of(choice)
    assert [(b.kind, b.text, b.name, b.is_complete) for b in folded] == [
        (b.kind, b.text, b.name, b.is_complete) for b in reader.blocks
    ]
    return events


def test_a_block_ends_before_the_next_one_starts() -> None:
    events = read(
        TextDelta(index=0, text="", reasoning="a"),
        TextDelta(index=0, text="c", reasoning="b"),
        TextDelta(index=0, text="", tool_events=(CALL, ToolArguments(index=0, text="{}"))),
        TextDelta(index=0, text="", tool_events=(ToolCallEnded(index=0),)),
        reason="tool_calls",
    )

    assert events == [
        *[("start", 0, "reasoning"), ("text", 0, "a"), ("text", 0, "b"), ("end", 0, True)],
        *[("start", 1, "text"), ("text", 1, "c"), ("end", 1, True)],
        *[("start", 2, "call"), ("text", 2, "{}"), ("end", 2, True)],
    ]


def test_what_a_limit_cut_off_is_not_complete() -> None:
    assert read(TextDelta(index=0, text="a"), reason="length")[-1] == ("end", 0, False)
    cut = TextDelta(index=0, text="a", tool_events=(CALL,))
    for reason in ("length", "stop"):
        assert read(cut, reason=reason)[-3:] == [
            *[("end", 0, True), ("start", 1, "call"), ("end", 1, False)]
        ]


def test_an_empty_answer_is_one_empty_text() -> None:
    assert read(TextDelta(index=0, text="")) == [("start", 0, "text"), ("end", 0, True)]
