"""Turns a checked chat into what the engine gets: tokens and sampling parameters."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from whalepod.scheduler.limits import max_total_tokens
from whalepod.scheduler.params import SamplingParams
from whalepod.server.errors import StartupError
from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.chat_formats.interface import (
    ChatFormat,
    Parser,
    ParserOptions,
    PlainParser,
)
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.guided_decoding import GuidedDecoding
from whalepod.server.gateway.prompts import Prompts
from whalepod.server.gateway.schema import ChatRequest, SamplingFields
from whalepod.server.gateway.tools import Functions, ToolChoice, read_choice, read_functions
from whalepod.server.messages import EngineInfo, Submit
from whalepod.server.tokenizer import TextTokenizer

_SAMPLING_NAMES: Final = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "ignore_eos"),
    "num_speculative_tokens",
)
_NO_CALLS: Final = ToolChoice(mode="none")


class Preparation:
    """Checks requests against the engine's limits and builds their runs; runs on a thread."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: TextTokenizer,
        default_params: Mapping[str, Any],
        chat_format: ChatFormat | None = None,
        *,
        allows_priority: bool = False,
    ) -> None:
        self._info = info
        self._defaults = dict(default_params)
        self._format = chat_format
        self._allows_priority = allows_priority
        self.prompts = Prompts(tokenizer, chat_format, info)
        self._cache_salt = CacheSalt()
        self._grammars = GuidedDecoding(chat_format, tokenizer)
        markers = chat_format.markers if chat_format else ()
        self._markup_ids = tokenizer.ids_of(markers)
        self._token_markers = frozenset(each for each in markers if tokenizer.ids_of([each]))
        try:
            SamplingParams(**self._defaults)
        except ValueError as error:
            raise StartupError(f"default sampling parameters: {error}") from error

    def chat(self, request: ChatRequest) -> list[PromptRun]:
        """Return the one run of a chat request."""
        if request.top_logprobs is not None and not request.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        asked = request.max_completion_tokens
        name = "max_tokens" if asked is None else "max_completion_tokens"
        max_tokens = request.max_tokens if asked is None else asked
        if max_tokens is not None and max_tokens < 1:
            raise invalid(name, f"{name} must be at least 1, got {max_tokens}")
        functions: Functions = {}
        choice, constraint, param = _NO_CALLS, None, ""
        if is_guided := not _is_plain(request):
            functions = read_functions(request.tools)
            choice = read_choice(request.tool_choice, functions)
        token_ids = self.prompts.chat(request.messages, request, choice)
        start = self.prompts.start(token_ids, request.messages[-1])
        if is_guided:
            constraint, param = self._grammars.of_chat(request, functions, choice, start)
        params = self.params(
            request,
            max_tokens=self.clamp(len(token_ids), max_tokens, "messages"),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            constraint=constraint,
        )
        new_parser: Callable[[], Parser] = PlainParser
        if self._format is not None:
            options = ParserOptions(
                start=start,
                tools=None if choice.mode == "none" else functions,
                parallel=request.parallel_tool_calls is not False,
                new_id=_new_call_id,
                token_markers=self._token_markers,
            )
            new_parser = partial(self._format.new_parser, options)
        fields = {"new_parser": new_parser, "markup_ids": self._markup_ids}
        return [self.run(request, token_ids, params, constraint_param=param, **fields)]

    def clamp(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """Return how many tokens may be generated; more than the context holds is cut."""
        limit = self._info.max_model_len
        total = max_total_tokens(num_prompt_tokens, max_tokens, max_model_len=limit, param=param)
        return total - num_prompt_tokens

    def params(self, request: SamplingFields, **fields: Any) -> SamplingParams:
        """Return the engine's parameters; ApiError names the field that is out of range."""
        named = {name: getattr(request, name) for name in _SAMPLING_NAMES}
        given = {name: value for name, value in named.items() if value is not None}
        stops = {"stop_token_ids": tuple(request.stop_token_ids or ())}
        self.prompts.check_vocabulary(stops["stop_token_ids"], "stop_token_ids")
        self.prompts.check_vocabulary(tuple(request.logit_bias or ()), "logit_bias")
        try:
            return SamplingParams(**{**self._defaults, **given, **fields, **stops})
        except ValueError as error:  # its message begins with the parameter's name
            raise invalid(str(error).partition(" ")[0], str(error)) from None

    def run(
        self,
        request: SamplingFields,
        token_ids: list[int],
        params: SamplingParams,
        **fields: Any,
    ) -> PromptRun:
        """Return the run of one prompt."""
        if request.priority and not self._allows_priority:
            message = "priority is not taken from clients here: start with --allow-priority"
            raise invalid("priority", message)
        submit = Submit(
            request_id=secrets.token_hex(16),
            prompt_token_ids=tuple(token_ids),
            params=params,
            num_sequences=request.n or 1,
            priority=request.priority or 0,
            cache_salt=self._cache_salt(request.cache_salt),
        )
        return PromptRun(
            submit=submit,
            stops=tuple(request.stop or ()),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            **fields,
        )


def _is_plain(request: ChatRequest) -> bool:
    """Return whether a chat asks nothing of the form of its answer, and offers no tools."""
    wishes = (
        *(request.tools, request.tool_choice, request.structured_outputs),
        *(request.response_format, request.thinking_token_budget),
    )
    return not isinstance(request.thinking, dict) and all(wish is None for wish in wishes)


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class CacheSalt:
    """Turns what a request says about sharing into the salt of its prefix hashes.

    The salt is keyed with a secret of this process: it cannot be guessed, and what clients chose
    as their secret is in no message and no journal.
    """

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(32)

    def __call__(self, wish: str | None) -> str:
        """Return one salt for equal values of `cache_salt`; "" for none."""
        if not wish:
            return ""
        return hmac.new(self._secret, wish.encode(), hashlib.sha256).hexdigest()[:32]
