"""Which tokens of an answer make the text that its client sees."""

from __future__ import annotations

from collections.abc import Iterable

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.content_blocks import BlockEvent, BlockGrew


class TextTokens:
    """Follows the tokens of one choice: those of reasoning, markup and calls are not of its text.

    Text may come out later than its tokens: it could have been the beginning of markup.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[str, TokenLogprob | None]] = []
        """What has not come out yet of tokens; None: the token is told of already."""

    def push(self, piece: str, logprob: TokenLogprob) -> None:
        """Add a token that decodes to `piece`, "" for the first bytes of a character."""
        self._waiting.append((piece, logprob))

    def take(self, events: Iterable[BlockEvent]) -> list[TokenLogprob]:
        """Return the tokens of the text in `events`, which came of the newest token."""
        found: list[TokenLogprob] = []
        for event in events:
            if isinstance(event, BlockGrew):
                if event.kind == "call":  # arguments may be written anew: no part of their tokens
                    self._waiting.clear()
                    continue
                tokens = self._tokens_of(event.text)
                found += tokens if event.kind == "text" else ()
        return found

    def _tokens_of(self, text: str) -> list[TokenLogprob]:
        """Return the tokens that a text came from, and forget what was before it."""
        pieces = "".join(piece for piece, _ in self._waiting)
        start = 0 if pieces.startswith(text) else pieces.rfind(text)
        is_rest = start < 0  # of a character that never ended: in none of the pieces
        end, place = start + len(text), 0
        found: list[TokenLogprob] = []
        unfinished: list[tuple[str, TokenLogprob | None]] = []  # they share their character
        left: list[tuple[str, TokenLogprob | None]] = []
        for piece, token in self._waiting:
            place += len(piece)
            unfinished.append((piece, token))
            if not piece and not is_rest:
                continue
            if is_rest or (start < place and place - len(piece) < end):
                found += [token for _, token in unfinished if token is not None]
                if place > end and not is_rest:
                    left.append((piece[end - place :], None))
            elif place > end:
                left += unfinished
            unfinished = []
        self._waiting = left + unfinished
        return found
