"""Text completions on the wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.encoder import (
    DONE,
    LOWEST_LOGPROB,
    PING,
    EncoderOptions,
    frame,
    usage_fields,
)
from whalepod.server.gateway.events import (
    Choice,
    ChoiceStarted,
    Delta,
    Event,
    Failed,
    Finished,
    FoldedAnswer,
    UsageReady,
)
from whalepod.server.tokenizer import TextTokenizer


class CompletionEncoder:
    """Write `text_completion` frames, or one such object."""

    ping = PING

    def __init__(
        self, header: Mapping[str, object], options: EncoderOptions, tokenizer: TextTokenizer
    ) -> None:
        """`header` is what each chunk repeats of the answer."""
        self._options = options
        self._tokenizer = tokenizer
        self._fields = {**header, "object": "text_completion"}
        self._begun: set[int] = set()

    def frames(self, event: Event) -> bytes:
        match event:
            case ChoiceStarted():
                return b""
            case Delta():
                return self._text_frame(event)
            case Finished():
                return self._choice_frame(
                    event.index, "", finish_reason=event.reason, stop_reason=event.stop_reason
                )
            case UsageReady():
                return self._usage_frame(event) + DONE
            case Failed():
                return frame(event.error.body())

    def body(self, answer: FoldedAnswer) -> dict[str, object]:
        choices = [self._choice(choice) for choice in answer.choices]
        return {**self._fields, "choices": choices, "usage": usage_fields(answer.usage)}

    def _choice(self, choice: Choice) -> dict[str, object]:
        logprobs = self._logprobs(choice.logprob_token_ids, choice.logprobs, choice.text_offsets)
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **self._token_ids(choice.index, choice.token_ids, is_first=True),
        }

    def _text_frame(self, event: Delta) -> bytes:
        """One frame for what there is to say; that an answer has begun is said in any case.

        The first token may be half a character, or the start of a stop string.
        """
        text = event.text
        is_first = event.index not in self._begun
        self._begun.add(event.index)
        if not (text or self._options.shows_tokens or is_first):
            return b""
        new_ids = () if event.is_prompt else event.token_ids
        logprobs = self._logprobs(event.token_ids, event.logprobs, event.text_offsets)
        extra = self._token_ids(event.index, new_ids, is_first=is_first)
        return self._choice_frame(event.index, text, logprobs=logprobs, **extra)

    def _choice_frame(self, index: int, text: str, **fields: object) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return frame({**self._fields, "choices": [{**choice, **fields}]})

    def _usage_frame(self, usage: UsageReady) -> bytes:
        if not self._options.include_usage:
            return b""
        return frame({**self._fields, "choices": [], "usage": usage_fields(usage)})

    def _logprobs(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob | None],
        text_offsets: Sequence[int],
    ) -> dict[str, object] | None:
        num_top = self._options.num_top_logprobs
        if num_top is None:
            return None
        return completion_logprobs(token_ids, logprobs, text_offsets, num_top, self._tokenizer)

    def _token_ids(
        self, index: int, token_ids: Sequence[int], *, is_first: bool
    ) -> dict[str, object]:
        """Return the new ids; the first time for a choice the ids of its prompt, too."""
        if not self._options.return_token_ids:
            return {}
        fields: dict[str, object] = {"token_ids": list(token_ids)}
        if is_first:
            prompt = self._options.prompts_token_ids[index // self._options.num_choices_per_prompt]
            fields["prompt_token_ids"] = list(prompt)
        return fields


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    text_offsets: Sequence[int],
    num_top: int,
    tokenizer: TextTokenizer,
) -> dict[str, object]:
    """Return completions' `logprobs`: four lists of one entry per token.

    The first token of an echoed prompt has neither a log-probability nor alternatives.
    """

    def alternatives(token: TokenLogprob | None) -> dict[str, float] | None:
        if token is None:
            return None
        chosen = (token.token_id, token.logprob)  # always there, however unlikely
        pairs = [*token.top[:num_top], chosen]
        return {tokenizer.printable(i): max(value, LOWEST_LOGPROB) for i, value in pairs}

    return {
        "tokens": [tokenizer.printable(token_id) for token_id in token_ids],
        "token_logprobs": [token and max(token.logprob, LOWEST_LOGPROB) for token in logprobs],
        "top_logprobs": [alternatives(token) for token in logprobs],
        "text_offset": list(text_offsets),
    }
