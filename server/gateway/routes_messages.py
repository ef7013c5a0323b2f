"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from __future__ import annotations

import secrets

from fastapi import APIRouter, Request, Response

from whalepod.server.gateway.anthropic_encoder import AnthropicEncoder
from whalepod.server.gateway.anthropic_input import (
    CHAT_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_of,
    prompt_fields,
)
from whalepod.server.gateway.body import read_json, validate
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import generate
from whalepod.server.gateway.http_responses import prepare, respond
from whalepod.server.gateway.metrics import RequestTimer
from whalepod.server.gateway.openapi import json_body
from whalepod.server.gateway.renaming import renamed
from whalepod.server.gateway.schema import ChatRequest

router = APIRouter()


@router.post("/v1/messages", openapi_extra=json_body(MessagesRequest))
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's form."""
    gateway = gateway_of(request)
    timer = RequestTimer(gateway.metrics)
    body = await read_json(request, MessagesRequest, gateway.config.max_body_bytes)
    model = gateway.check_model(body.model)
    with renamed(CHAT_NAMES):
        chat = gateway.scripted(chat_of(body), request.url.path)
        runs = await prepare(request, lambda: gateway.preparation.chat(chat))
        encoder = AnthropicEncoder(
            f"msg_{secrets.token_hex(16)}",
            model,
            len(runs[0].submit.prompt_token_ids),
            shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        )
        events = generate(gateway.upstream, runs, gateway.tokenizer, timer)
        return await respond(request, events, encoder, stream=bool(body.stream))


@router.post("/v1/messages/count_tokens", openapi_extra=json_body(CountTokensRequest))
async def count_tokens(request: Request) -> dict[str, object]:
    """Count the tokens of the prompt that a message request would make."""
    gateway = gateway_of(request)
    body = await read_json(request, CountTokensRequest, gateway.config.max_body_bytes)
    gateway.check_model(body.model)
    with renamed(CHAT_NAMES):
        chat = validate(ChatRequest, prompt_fields(body))
        token_ids = await gateway.offload.run(lambda: gateway.preparation.prompt_of(chat))
    return {"input_tokens": len(token_ids)}
