"""Text to tokens and back: a checkpoint's tokenizer and chat template."""

from __future__ import annotations

import asyncio
import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

from transformers import PreTrainedTokenizerFast

from whalepod.scheduler.limits import RequestRejected, prompt_too_long
from whalepod.server.chat_template import ChatTemplate, TemplateHabits, template_of
from whalepod.server.errors import StartupError
from whalepod.server.token_bytes import bytes_of_tokens

# A noncharacter: it marks where the text of a token inside a message is broken up.
_BREAK: Final = "\ufdd0"
_TRUSTED_ROLES: Final = ("system", "developer")
_THOUGHT: Final = re.compile(r"(\s*<think>)(.*?)(</think>)", re.DOTALL)
"""What clients send back that take the reasoning for a part of the text."""


class TextTokenizer:
    """Encode, render and decode. Methods are thread safe and belong off the event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, adds_bos: bool) -> None:
        self.transformers: Final = tokenizer
        self._adds_bos = adds_bos and tokenizer.bos_token_id is not None
        self.token_bytes: Final = bytes_of_tokens(tokenizer.backend_tokenizer.to_str())
        """The bytes of each token by id."""
        self.special_ids: Final = frozenset(tokenizer.all_special_ids)
        text = template_of(tokenizer.chat_template)
        tokens = tokenizer.special_tokens_map
        self.template: Final = ChatTemplate(text, tokens) if text else None
        self._markers = _beginnings_of(
            token.content for token in tokenizer.added_tokens_decoder.values()
        )
        # a token's bytes may be none (padding ids), hence `default`
        self._longest_token_bytes = max(map(len, self.token_bytes), default=1)

    @classmethod
    def from_folder(cls, folder: Path, chat_template: Path | None = None) -> TextTokenizer:
        """Load the tokenizer files of a checkpoint; StartupError says what is wrong with them.

        `chat_template` names a Jinja file that replaces the checkpoint's own template.
        """
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
            if chat_template is not None:
                tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
            return cls(tokenizer, adds_bos=_adds_bos(folder, tokenizer))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"{folder}: cannot load the tokenizer: {error}") from error

    @property
    def habits(self) -> TemplateHabits:
        """What the chat template wants of messages; RequestRejected if there is none."""
        return self._known_template().habits

    def _known_template(self) -> ChatTemplate:
        if self.template is None:
            raise RequestRejected(
                "invalid_request",
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template FILE",
                "messages",
            )
        return self.template

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Return the ids of the texts that are one token each."""
        vocab = self.transformers.get_vocab()
        return frozenset(vocab[token] for token in tokens if token in vocab)

    def encode(self, text: str, *, adds_bos: bool = True) -> list[int]:
        """Return the tokens of a raw prompt: special tokens are parsed, one BOS comes first."""
        token_ids = self._encode(text)
        return self._with_one_bos(token_ids) if adds_bos else token_ids

    def encode_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        describe_tools: Callable[[Sequence[dict[str, Any]]], str] | None = None,
    ) -> list[int]:
        """Render the chat template and return its tokens, with one BOS.

        What users, tools and models said never becomes a special token, nor what a tool's
        definition says: <｜Assistant｜> in it is encoded as its letters. Only system messages may
        hold tokens, and what `describe_tools` adds to them for a template that does not render
        tools. Raises RequestRejected when the template refuses, or when more than `max_tokens`
        would come out, as far as that is known without encoding.
        """
        template = self._known_template()
        safe = [self._as_letters(message) for message in messages]
        safe_tools = self.letters(list(tools)) if tools else None
        if safe_tools and describe_tools is not None:
            safe, safe_tools = with_system_text(safe, describe_tools(safe_tools)), None
        try:
            rendered = template.render(
                safe,
                tools=safe_tools,
                add_generation_prompt=add_generation_prompt,
                arguments=self.letters(dict(template_arguments or {})),
            )
        except Exception as error:  # a template is code: it can fail in any way
            message = f"the chat template refuses these messages: {error}"
            raise RequestRejected("invalid_request", message, "messages") from error
        self.check_length(rendered, max_tokens, "messages")
        return self._with_one_bos(self.encode_letters(rendered))

    def encode_letters(self, text: str) -> list[int]:
        """Return the tokens of a text in which `letters` broke up what is no token."""
        return [token_id for run in text.split(_BREAK) for token_id in self._encode(run)]

    def letters(self, value: Any) -> Any:
        """Return a text, or a JSON value, in which no token's text is whole."""
        match value:
            case str():
                return self._markers.sub(rf"\1{_BREAK}", value.replace(_BREAK, ""))
            case dict():
                return {self.letters(key): self.letters(each) for key, each in value.items()}
            case list() | tuple():
                return [self.letters(each) for each in value]
        return value

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def detokenizer(
        self, *, skip_special_tokens: bool = True, kept_ids: frozenset[int] = frozenset()
    ) -> IncrementalDetokenizer:
        """Return a fresh decoder for one answer; `kept_ids` are never skipped."""
        skipped = self.special_ids - kept_ids if skip_special_tokens else frozenset[int]()
        return IncrementalDetokenizer(self.token_bytes, skipped)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of a token; none for ids beyond the tokenizer's vocabulary."""
        return self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""

    def printable(self, token_id: int) -> str:
        r"""Return the token as text, or as `bytes:\xe4\xb8` when it is part of a character."""
        data = self.bytes_of(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the tokens of `text`, without encoding it."""
        return -(-len(text.encode()) // self._longest_token_bytes)

    def check_length(self, text: str, max_tokens: int | None, param: str) -> None:
        """Refuse a text that cannot fit before seconds are spent on encoding it.

        Raises RequestRejected that names the field `param`.
        """
        fewest = self.fewest_tokens(text)
        if max_tokens is not None and fewest > max_tokens:
            raise prompt_too_long(f"at least {fewest}", max_tokens, param)

    def _encode(self, text: str) -> list[int]:
        # of a batch, since it gives the interpreter's lock away; no offsets: three times as fast
        backend = self.transformers.backend_tokenizer
        ids: list[int] = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _with_one_bos(self, token_ids: list[int]) -> list[int]:
        bos = self.transformers.bos_token_id
        if not self._adds_bos or token_ids[:1] == [bos]:
            return token_ids
        return [bos, *token_ids]

    def _as_letters(self, message: Mapping[str, Any]) -> dict[str, Any]:
        role, content = message["role"], message.get("content")
        if role in _TRUSTED_ROLES:
            return dict(message)
        safe: dict[str, Any] = {**self.letters(dict(message)), "role": role}
        if role == "assistant" and content and (thought := _THOUGHT.match(content)):
            opening, text, end = thought.groups()
            rest = content[thought.end() :]
            safe["content"] = opening + self.letters(text) + end + self.letters(rest)
        return safe


def _beginnings_of(markers: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern of the first characters of markers; a single character is no marker."""
    longer = sorted({marker for marker in markers if len(marker) > 1}, key=len, reverse=True)
    rests: dict[str, list[str]] = {}
    for marker in longer:
        rests.setdefault(marker[0], []).append(re.escape(marker[1:]))
    alternatives = (f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items())
    return re.compile(f"({'|'.join(alternatives)})") if rests else re.compile("((?!))")


def with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return messages whose last system message, a new one without any, ends with `text`."""
    found = [i for i, message in enumerate(messages) if message["role"] == "system"]
    if not found:
        return [{"role": "system", "content": text}, *messages]
    content = messages[found[-1]].get("content")
    changed = {**messages[found[-1]], "content": f"{content}\n\n{text}" if content else text}
    return [*messages[: found[-1]], changed, *messages[found[-1] + 1 :]]


def _adds_bos(folder: Path, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return whether raw prompts begin with BOS.

    `PreTrainedTokenizerFast` drops `add_bos_token` of tokenizer_config.json, so it is read here.
    """
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    added: list[int] = tokenizer.encode("")
    return bool(config.get("add_bos_token", added[:1] == [tokenizer.bos_token_id]))


class IncrementalDetokenizer:
    """Decode a growing sequence of byte-level tokens; each token costs O(its bytes).

    The pieces that `push` and `flush` return add up to the decoding of the whole sequence. Bytes
    that begin a character wait for the rest of it; bytes that can never be part of one become
    U+FFFD, as in a full decode.
    """

    def __init__(self, token_bytes: Sequence[bytes], skipped_ids: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; "" while a character is incomplete."""
        if token_id in self._skipped_ids or token_id >= len(self._token_bytes):
            return ""
        return self._decoder.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """Return what an unfinished character decodes to: U+FFFD, or "" when there is none."""
        return self._decoder.decode(b"", final=True)


Result = TypeVar("Result")


LARGE_BYTES: Final = 128 * 1024
"""Requests from this size on take turns: together they hold one thread."""


class TokenizerPool:
    """A few threads for work that would hold up the event loop, with a bound on what waits."""

    def __init__(self, num_threads: int, max_pending: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="whalepod-tokenizer")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="whalepod-large")
        self._max_pending = max_pending
        self._num_pending = 0

    async def run(self, work: Callable[[], Result], num_bytes: int = 0) -> Result:
        """Return `work()`, computed on a thread; RequestRejected queue_full when too much waits.

        `num_bytes` is about the size of what it works on.
        """
        if self._num_pending >= self._max_pending:
            message = f"{self._num_pending} prompts wait for the tokenizer"
            raise RequestRejected("queue_full", message)
        self._num_pending += 1
        try:
            pool = self._pool if num_bytes < LARGE_BYTES else self._large
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        finally:
            self._num_pending -= 1

    def close(self) -> None:
        """Drop what waits and end the threads."""
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False, cancel_futures=True)
