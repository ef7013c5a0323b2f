"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from whalepod.server.gateway.body import read_json
from whalepod.server.gateway.chat_encoder import ChatEncoder
from whalepod.server.gateway.completion_encoder import CompletionEncoder
from whalepod.server.gateway.encoder import EncoderOptions
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import PromptRun, generate
from whalepod.server.gateway.http_responses import prepare, respond
from whalepod.server.gateway.metrics import RequestTimer
from whalepod.server.gateway.openapi import json_body
from whalepod.server.gateway.schema import ChatRequest, CompletionRequest, SamplingFields

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    gateway = gateway_of(request)
    timer = RequestTimer(gateway.metrics)
    body = await read_json(request, ChatRequest, gateway.config.max_body_bytes)
    header = gateway.header("chatcmpl", gateway.check_model(body.model))
    body = gateway.scripted(body, request.url.path)
    runs = await prepare(request, lambda: gateway.preparation.chat(body))
    encoder = ChatEncoder(header, _options(body, runs), gateway.tokenizer)
    events = generate(gateway.upstream, runs, gateway.tokenizer, timer)
    return await respond(request, events, encoder, stream=bool(body.stream))


@router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    gateway = gateway_of(request)
    timer = RequestTimer(gateway.metrics)
    body = await read_json(request, CompletionRequest, gateway.config.max_body_bytes)
    header = gateway.header("cmpl", gateway.check_model(body.model))
    body = gateway.scripted(body, request.url.path)
    runs = await prepare(request, lambda: gateway.preparation.completion(body))
    encoder = CompletionEncoder(header, _options(body, runs), gateway.tokenizer)
    events = generate(gateway.upstream, runs, gateway.tokenizer, timer)
    return await respond(request, events, encoder, stream=bool(body.stream))


def _options(body: SamplingFields, runs: Sequence[PromptRun]) -> EncoderOptions:
    return EncoderOptions(
        include_usage=body.include_usage,
        num_top_logprobs=runs[0].submit.params.logprobs,
        return_token_ids=bool(body.return_token_ids),
        prompts_token_ids=tuple(run.submit.prompt_token_ids for run in runs),
        num_choices_per_prompt=body.n or 1,
    )
