"""Answers that are nothing but text: raw completions, and chats in a format nobody knows."""

from __future__ import annotations

from collections.abc import Sequence

from whalepod.server.gateway.families.interface import ContentText, ParsedEvent


class PlainParser:
    """Hands everything through."""

    in_reasoning = False

    def feed(self, text: str) -> Sequence[ParsedEvent]:
        return (ContentText(text=text),) if text else ()

    def finish(self, *, complete: bool) -> Sequence[ParsedEvent]:
        return ()
