"""OpenAI's routes that generate from a conversation or a text."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from whalepod.server.gateway.body import JsonRoute
from whalepod.server.gateway.chat_encoder import ChatEncoder
from whalepod.server.gateway.completion_encoder import CompletionEncoder
from whalepod.server.gateway.completion_input import CompletionRequest, completion_runs
from whalepod.server.gateway.encoder import EncoderOptions
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.http_responses import answer
from whalepod.server.gateway.schema import ChatRequest, SamplingFields

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(request)
    header = gateway.header("chatcmpl", body.model)
    return await answer(
        request,
        lambda: gateway.preparation.chat(body),
        lambda runs: ChatEncoder(header, _options(body, runs), gateway.tokenizer),
        stream=body.stream,
    )


@router.post("/v1/completions")
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue one or several prompts."""
    gateway = gateway_of(request)
    header = gateway.header("cmpl", body.model)
    return await answer(
        request,
        lambda: completion_runs(gateway.preparation, body),
        lambda runs: CompletionEncoder(header, _options(body, runs), gateway.tokenizer),
        stream=body.stream,
    )


def _options(body: SamplingFields, runs: Sequence[PromptRun]) -> EncoderOptions:
    return EncoderOptions(
        include_usage=body.include_usage,
        num_top_logprobs=runs[0].submit.params.logprobs,
        return_token_ids=bool(body.return_token_ids),
        prompts_token_ids=tuple(run.submit.prompt_token_ids for run in runs),
        num_choices_per_prompt=body.n or 1,
    )
