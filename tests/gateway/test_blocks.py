"""An answer falls into the same blocks however it is cut, and events fold to them."""

from __future__ import annotations

from collections.abc import Callable

from whalepod.server.gateway.content_blocks import (
    BlockEnded,
    BlockEvent,
    BlockGrew,
    BlockStarted,
    BlockWriter,
)
from whalepod.server.gateway.events import Choice, Delta, Finished

Step = Callable[[BlockWriter], None]


def reasoning(text: str) -> Step:
    return lambda blocks: blocks.grow("reasoning", text)


def text(text: str) -> Step:
    return lambda blocks: blocks.grow("text", text)


def arguments(text: str) -> Step:
    return lambda blocks: blocks.grow("call", text)


def call(blocks: BlockWriter) -> None:
    blocks.start_call("call_1", "w")


def short(event: BlockEvent) -> tuple[object, ...]:
    match event:
        case BlockStarted():
            return "start", event.index, event.kind
        case BlockGrew():
            return "text", event.index, event.text
        case BlockEnded():
            return "end", event.index, event.is_complete


def read(*deltas: tuple[Step, ...], reason: str = "stop") -> list[tuple[object, ...]]:
    """Return the events of deltas, which must fold to what they say."""
    writer, choice, events = BlockWriter(), Choice(0), list[BlockEvent]()
    for steps in deltas:
        for step in steps:
            step(writer)
        delta = Delta(index=0, blocks=writer.take())
        choice.add(delta)
        events += delta.blocks
    end = Finished(index=0, reason=reason, blocks=writer.finish(is_complete=reason != "length"))
    choice.add(end)
    events += end.blocks
    pieces = [(e.index, e.text) for e in events if isinstance(e, BlockGrew)]
    for block in choice.blocks:
        assert block.text == "".join(text for index, text in pieces if index == block.index)
        assert ("start", block.index, block.kind) in map(short, events)
        assert ("end", block.index, block.is_complete) in map(short, events)
        assert block.name == ("w" if block.kind == "call" else "")
    return [short(event) for event in events]


def test_a_block_ends_before_the_next_one_starts() -> None:
    events = read(
        (reasoning("a"),),
        (reasoning("b"), text("c")),
        (call, arguments("{}")),
        (BlockWriter.end_call,),
        reason="tool_calls",
    )

    assert events == [
        *[("start", 0, "reasoning"), ("text", 0, "a"), ("text", 0, "b"), ("end", 0, True)],
        *[("start", 1, "text"), ("text", 1, "c"), ("end", 1, True)],
        *[("start", 2, "call"), ("text", 2, "{}"), ("end", 2, True)],
    ]


def test_pieces_of_one_delta_become_one() -> None:
    events = read((reasoning("a"), reasoning("b"), text("c"), text(""), text("d")))

    assert events == [
        *[("start", 0, "reasoning"), ("text", 0, "ab"), ("end", 0, True)],
        *[("start", 1, "text"), ("text", 1, "cd"), ("end", 1, True)],
    ]


def test_what_a_limit_cut_off_is_not_complete() -> None:
    assert read((text("a"),), reason="length")[-1] == ("end", 0, False)
    for reason in ("length", "stop"):
        assert read((text("a"), call), reason=reason)[-3:] == [
            *[("end", 0, True), ("start", 1, "call"), ("end", 1, False)]
        ]


def test_an_empty_answer_is_one_empty_text() -> None:
    assert read((text(""),)) == [("start", 0, "text"), ("end", 0, True)]
