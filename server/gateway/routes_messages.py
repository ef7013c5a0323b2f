"""Anthropic's Messages API."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from whalepod.server.gateway.anthropic_encoder import AnthropicEncoder
from whalepod.server.gateway.anthropic_input import (
    CHAT_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_of_messages,
    prompt_fields,
)
from whalepod.server.gateway.api_errors import errors_in
from whalepod.server.gateway.body import JsonRoute, validate
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.http_responses import answer
from whalepod.server.gateway.schema import ChatRequest
from whalepod.server.gateway.tools import read_choice, read_functions

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/messages")
async def create_message(request: Request, body: MessagesRequest) -> Response:
    """Answer a conversation in Anthropic's form."""
    gateway = gateway_of(request)
    model = gateway.check_model(body.model)

    def chat() -> list[PromptRun]:
        return gateway.preparation.chat(chat_of_messages(body))

    def new_encoder(runs: Sequence[PromptRun]) -> AnthropicEncoder:
        shows_thinking = body.thinking is None or body.thinking.display != "omitted"
        num_tokens = len(runs[0].submit.prompt_token_ids)
        return AnthropicEncoder(
            f"msg_{secrets.token_hex(16)}", model, num_tokens, shows_thinking=shows_thinking
        )

    with errors_in(CHAT_NAMES):
        return await answer(request, chat, new_encoder, stream=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> dict[str, object]:
    """Count the tokens of the prompt that a message request would make."""
    gateway = gateway_of(request)
    gateway.check_model(body.model)
    with errors_in(CHAT_NAMES):
        chat = validate(ChatRequest, prompt_fields(body))
        choice = read_choice(chat.tool_choice, read_functions(chat.tools))
        token_ids = await gateway.tokenizer_pool.run(
            lambda: gateway.preparation.prompts.chat(chat.messages, chat, choice),
            request.state.num_body_bytes,
        )
    return {"input_tokens": len(token_ids)}
