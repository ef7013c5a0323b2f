"""Turns a validated request into what the engine gets: tokens and sampling parameters."""

from __future__ import annotations

import inspect
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from transformers import PreTrainedTokenizerFast

from whalepod.scheduler.limits import max_total_tokens, prompt_too_long
from whalepod.scheduler.params import SamplingParams
from whalepod.server.errors import StartupError
from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.cache_salt import CacheSalt
from whalepod.server.gateway.chat_formats.interface import (
    ChatFormat,
    Parser,
    ParserOptions,
    PlainParser,
    Start,
)
from whalepod.server.gateway.continuation import check_prefix, prefix_reasoning
from whalepod.server.gateway.functions import (
    ToolChoice,
    check_history,
    function_tools,
    read_choice,
    read_functions,
    template_call,
)
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.guided_decoding import Constraints, of_completion
from whalepod.server.gateway.limits import MAX_NUM_CHOICES
from whalepod.server.gateway.schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    SamplingFields,
    TemplateFields,
)
from whalepod.server.messages import EngineInfo, Submit
from whalepod.server.tokenizer import TextTokenizer

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of /v1/completions; chat goes on to the end of the context."""

_TAIL_TOKENS: Final = 8
"""So many at the end of a prompt say where its answer begins."""

_RESERVED_TEMPLATE_ARGUMENTS: Final = frozenset(
    inspect.signature(PreTrainedTokenizerFast.apply_chat_template).parameters
) | {"messages"}

_SAMPLING_NAMES: Final = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "ignore_eos"),
    "num_speculative_tokens",
)


class Preparation:
    """Checks requests against the engine's limits and builds their runs; runs on a thread."""

    def __init__(
        self,
        info: EngineInfo,
        tokenizer: TextTokenizer,
        default_params: Mapping[str, float],
        chat_format: ChatFormat | None = None,
    ) -> None:
        self._info = info
        self._tokenizer = tokenizer
        self._default_params = default_params
        self._format = chat_format
        self._cache_salt = CacheSalt()
        self._constraints = Constraints(chat_format, tokenizer)
        self._markup_ids = tokenizer.ids_of(chat_format.markers if chat_format else ())
        try:
            SamplingParams(**self._defaults())
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
        functions = read_functions(request.tools)
        choice = read_choice(request.tool_choice, functions)
        token_ids = self.chat_tokens(request.messages, request, choice)
        start = self._start(token_ids, request.messages[-1])
        constraint, constraint_param = self._constraints.of_chat(request, functions, choice, start)
        params = self._params(
            request,
            max_tokens=self._clamp(len(token_ids), max_tokens, "messages"),
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            constraint=constraint,
        )
        run = self._run(request, token_ids, params)
        new_parser: Callable[[], Parser] = PlainParser
        if self._format is not None:
            options = ParserOptions(
                start=start,
                tools=None if choice.mode == "none" else functions,
                parallel=request.parallel_tool_calls is not False,
                new_id=_new_call_id,
            )
            new_parser = partial(self._format.new_parser, options)
        return [
            replace(
                run,
                new_parser=new_parser,
                markup_ids=self._markup_ids,
                constraint_param=constraint_param,
            )
        ]

    def prompt_of(self, request: ChatRequest) -> list[int]:
        """Return the tokens of a chat request's prompt, after the checks of its tools."""
        choice = read_choice(request.tool_choice, read_functions(request.tools))
        return self.chat_tokens(request.messages, request, choice)

    def _start(self, prompt_token_ids: Sequence[int], last: Message) -> Start:
        """Return where the answer to a rendered prompt begins."""
        if self._format is None or (last.prefix and last.content):
            return "content"
        if last.prefix and prefix_reasoning(last):
            return "reasoning"
        return self._format.start(self._tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:]))

    def completion(self, request: CompletionRequest) -> list[PromptRun]:
        """Return one run for each prompt."""
        if request.suffix:
            raise invalid("suffix", "suffix is not supported")
        num_choices = len(request.prompt) * (request.n or 1)
        if num_choices > MAX_NUM_CHOICES:
            message = f"prompts times n must be at most {MAX_NUM_CHOICES}, got {num_choices}"
            raise invalid("n", message)
        return [self._completion_run(request, prompt, i) for i, prompt in enumerate(request.prompt)]

    def _completion_run(
        self, request: CompletionRequest, prompt: str | list[int], position: int
    ) -> PromptRun:
        token_ids = self.prompt_tokens(prompt)
        asked = request.max_tokens
        max_tokens = DEFAULT_COMPLETION_TOKENS if asked is None else asked
        constraint, constraint_param = of_completion(request)
        params = self._params(
            request,
            max_tokens=self._clamp(len(token_ids), max_tokens, "prompt"),
            constraint=constraint,
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        first_index = position * (request.n or 1)
        run = self._run(request, token_ids, params, first_index, bool(request.echo))
        return replace(run, constraint_param=constraint_param)

    def prompt_tokens(self, prompt: str | list[int]) -> list[int]:
        """Return the tokens of a raw prompt, checked against vocabulary and context."""
        if isinstance(prompt, str):
            self._refuse_hopeless_text([prompt], "prompt")
            token_ids = self._tokenizer.encode(prompt)
        else:
            token_ids = prompt
            self.check_vocabulary(token_ids, "prompt")
        if not token_ids:
            raise invalid("prompt", "prompt has no tokens")
        return token_ids

    def chat_tokens(
        self,
        messages: Sequence[Message],
        fields: TemplateFields,
        choice: ToolChoice | None = None,
    ) -> list[int]:
        """Return the tokens of a rendered conversation."""
        check_history(messages)
        check_prefix(messages)
        *earlier, last = messages
        if last.prefix and earlier:
            return self._continued(earlier, last, fields, choice)
        as_objects = self._tokenizer.takes_argument_objects
        tools = [] if choice and choice.mode == "none" else function_tools(fields.tools)
        self._refuse_hopeless_text([m.content or "" for m in messages], "messages")
        return self._tokenizer.encode_chat(
            [_template_message(message, as_objects=as_objects) for message in messages],
            tools=tools or None,
            add_generation_prompt=fields.add_generation_prompt is not False,
            template_arguments=_template_arguments(fields),
        )

    def _continued(
        self,
        earlier: Sequence[Message],
        last: Message,
        fields: TemplateFields,
        choice: ToolChoice | None,
    ) -> list[int]:
        """Return the tokens of a conversation and of the beginning of its answer."""
        with_answer = fields.model_copy(update={"add_generation_prompt": True})
        token_ids = self.chat_tokens(earlier, with_answer, choice)
        text, reasoning = last.content or "", prefix_reasoning(last)
        if self._format is not None and self._format.reasoning_end is not None:
            start = self._format.start(self._tokenizer.decode(token_ids[-_TAIL_TOKENS:]))
            if start == "reasoning":
                text = reasoning + (self._format.reasoning_end + text if text else "")
            elif reasoning:
                raise invalid("messages", "messages: a reasoning to continue needs thinking: true")
        return token_ids + self._tokenizer.encode(text, adds_bos=False)

    def _clamp(self, num_prompt_tokens: int, max_tokens: int | None, param: str) -> int:
        """Return how many tokens may be generated; more than the context holds is cut."""
        limit = self._info.max_model_len
        total = max_total_tokens(num_prompt_tokens, max_tokens, max_model_len=limit, param=param)
        return total - num_prompt_tokens

    def _refuse_hopeless_text(self, texts: Sequence[str], param: str) -> None:
        """Refuse a text that cannot fit before the tokenizer spends seconds on it."""
        fewest = sum(map(self._tokenizer.fewest_tokens, texts))
        if fewest > self._info.max_model_len:
            raise prompt_too_long(f"at least {fewest}", self._info.max_model_len, param)

    def check_vocabulary(self, token_ids: Sequence[int], param: str) -> None:
        """Raise ApiError when a token id is not one of the model's."""
        limit = self._info.vocab_size
        for bound in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= bound < limit:
                raise invalid(param, f"{param}: token id {bound} is outside of 0..{limit - 1}")

    def _defaults(self) -> dict[str, Any]:
        return dict(self._default_params)

    def _params(self, request: SamplingFields, **fields: Any) -> SamplingParams:
        named = {name: getattr(request, name) for name in _SAMPLING_NAMES}
        given = {name: value for name, value in named.items() if value is not None}
        stop_token_ids = tuple(request.stop_token_ids or ())
        self.check_vocabulary(stop_token_ids, "stop_token_ids")
        self.check_vocabulary(tuple(request.logit_bias or ()), "logit_bias")
        try:
            return SamplingParams(
                **{**self._defaults(), **given, **fields}, stop_token_ids=stop_token_ids
            )
        except ValueError as error:  # its message begins with the parameter's name
            raise invalid(str(error).partition(" ")[0], str(error)) from None

    def _run(
        self,
        request: SamplingFields,
        token_ids: list[int],
        params: SamplingParams,
        first_index: int = 0,
        echo: bool = False,
    ) -> PromptRun:
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
            first_index=first_index,
            stops=tuple(request.stop or ()),
            include_stop=bool(request.include_stop_str_in_output),
            skip_special_tokens=request.skip_special_tokens is not False,
            echo=echo,
        )


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _template_message(message: Message, *, as_objects: bool) -> dict[str, Any]:
    """Return a message as templates know it: `developer` is a system message."""
    fields = message.model_dump(exclude_none=True, exclude={"reasoning", "prefix"})
    if message.reasoning_content is None and message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            template_call(call, as_objects=as_objects) for call in message.tool_calls
        ]
    fields["content"] = message.content
    if message.content is None:
        if message.role in ("system", "developer", "user"):
            raise invalid("messages", f"messages: a {message.role} message needs content")
        if not message.tool_calls:
            fields["content"] = ""
    if message.role == "developer":
        fields["role"] = "system"
    return fields


def _template_arguments(fields: TemplateFields) -> dict[str, Any]:
    arguments = dict(fields.chat_template_kwargs or {})
    for name in arguments:
        if name in _RESERVED_TEMPLATE_ARGUMENTS:
            raise invalid("chat_template_kwargs", f"chat_template_kwargs must not set {name}")
    thinking = fields.enable_thinking if fields.thinking is None else fields.thinking
    if isinstance(thinking, dict):
        thinking = thinking.get("type") == "enabled"
    if thinking is None:
        thinking = arguments.get("thinking", arguments.get("enable_thinking"))
    effort = fields.reasoning_effort
    if effort is not None:
        arguments.setdefault("reasoning_effort", effort)
        thinking = effort != "none" if thinking is None else thinking
    if thinking is not None:
        arguments |= {"thinking": bool(thinking), "enable_thinking": bool(thinking)}
    return arguments
