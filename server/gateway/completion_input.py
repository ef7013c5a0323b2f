"""What /v1/completions accepts, and what the engine gets of it."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.guided_decoding import (
    either,
    of_response_format,
    of_structured_outputs,
)
from whalepod.server.gateway.limits import MAX_NUM_CHOICES
from whalepod.server.gateway.preparation import Preparation
from whalepod.server.gateway.schema import ResponseFormat, SamplingFields

DEFAULT_COMPLETION_TOKENS: Final = 16
"""OpenAI's default of /v1/completions; chat goes on to the end of the context."""


def _check_prompt(value: object) -> object:
    """Return a list of prompts, each a string or a list of token ids."""
    match value:
        case str():
            prompts: list[Any] = [value]
        case [int(), *_]:
            prompts = [value]
        case [_, *_]:
            prompts = list(value)
        case _:
            raise ValueError("must be a string, or a list of strings or token ids, not empty")
    for prompt in prompts:
        if not isinstance(prompt, str) and not _is_token_list(prompt):
            raise ValueError("each prompt must be a string or a list of token ids (integers)")
        if not prompt and not isinstance(prompt, str):
            raise ValueError("a list of token ids must not be empty")
    return prompts


def _is_token_list(value: object) -> bool:
    # `type() is int`: True and False are no token ids
    return isinstance(value, list) and all(type(token_id) is int for token_id in value)


Prompt = Annotated[
    list[str | list[int]],
    BeforeValidator(
        _check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class CompletionRequest(SamplingFields):
    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


def completion_runs(preparation: Preparation, request: CompletionRequest) -> list[PromptRun]:
    """Return one run for each prompt."""
    if request.suffix:
        raise invalid("suffix", "suffix is not supported")
    num_choices = len(request.prompt) * (request.n or 1)
    if num_choices > MAX_NUM_CHOICES:
        message = f"prompts times n must be at most {MAX_NUM_CHOICES}, got {num_choices}"
        raise invalid("n", message)
    return [_run(preparation, request, prompt, i) for i, prompt in enumerate(request.prompt)]


def _run(
    preparation: Preparation, request: CompletionRequest, prompt: str | list[int], position: int
) -> PromptRun:
    token_ids = preparation.prompts.raw(prompt)
    asked = request.max_tokens
    max_tokens = DEFAULT_COMPLETION_TOKENS if asked is None else asked
    constraint, param = either(
        of_structured_outputs(request.structured_outputs),
        of_response_format(request.response_format),
    )
    params = preparation.params(
        request,
        max_tokens=preparation.clamp(len(token_ids), max_tokens, "prompt"),
        constraint=constraint,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo else None,
    )
    fields = {"first_index": position * (request.n or 1), "echo": bool(request.echo)}
    return preparation.run(request, token_ids, params, constraint_param=param, **fields)
