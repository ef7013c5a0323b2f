"""The routes that generate: OpenAI's chats, completions and responses, Anthropic's messages."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from fastapi import APIRouter, Request, Response

from whalepod.server.gateway.anthropic_encoder import AnthropicEncoder
from whalepod.server.gateway.anthropic_input import (
    CHAT_NAMES as ANTHROPIC_NAMES,
    CountTokensRequest,
    MessagesRequest,
    chat_of_messages,
    prompt_fields,
)
from whalepod.server.gateway.api_errors import errors_in
from whalepod.server.gateway.auth import given_key
from whalepod.server.gateway.body import JsonRoute, validate
from whalepod.server.gateway.chat_encoder import ChatEncoder, logprobs_writer
from whalepod.server.gateway.completion_encoder import CompletionEncoder
from whalepod.server.gateway.encoder import EncoderOptions
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.http_responses import answer
from whalepod.server.gateway.response_store import ResponseContext
from whalepod.server.gateway.responses_encoder import ResponsesEncoder, response_fields
from whalepod.server.gateway.responses_input import (
    CHAT_NAMES as RESPONSES_NAMES,
    ResponsesRequest,
    chat_of_items,
)
from whalepod.server.gateway.schema import ChatRequest, CompletionRequest, SamplingFields
from whalepod.server.gateway.tools import read_choice, read_functions

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
        lambda: gateway.preparation.completion(body),
        lambda runs: CompletionEncoder(header, _options(body, runs), gateway.tokenizer),
        stream=body.stream,
    )


@router.post("/v1/responses")
async def create_response(request: Request, body: ResponsesRequest) -> Response:
    """Answer items, or go on from an earlier response."""
    gateway = gateway_of(request)
    model = gateway.check_model(body.model)
    context = ResponseContext(gateway.stored_responses, body, given_key(request.scope))

    def chat() -> list[PromptRun]:
        chat = chat_of_items(body, context.items, context.earlier_items)
        return gateway.preparation.chat(chat)

    def new_encoder(runs: Sequence[PromptRun]) -> ResponsesEncoder:
        params = runs[0].submit.params
        return ResponsesEncoder(
            response_fields(body, context.ids, model, params),
            context.ids,
            context.keep,
            logprobs_writer(params.logprobs, gateway.tokenizer),
        )

    with errors_in(RESPONSES_NAMES):
        return await answer(request, chat, new_encoder, stream=body.stream)


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

    with errors_in(ANTHROPIC_NAMES):
        return await answer(request, chat, new_encoder, stream=body.stream)


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request, body: CountTokensRequest) -> dict[str, object]:
    """Count the tokens of the prompt that a message request would make."""
    gateway = gateway_of(request)
    gateway.check_model(body.model)
    with errors_in(ANTHROPIC_NAMES):
        chat = validate(ChatRequest, prompt_fields(body))
        choice = read_choice(chat.tool_choice, read_functions(chat.tools))
        token_ids = await gateway.tokenizer_pool.run(
            lambda: gateway.preparation.prompts.chat(chat.messages, chat, choice)
        )
    return {"input_tokens": len(token_ids)}


def _options(body: SamplingFields, runs: Sequence[PromptRun]) -> EncoderOptions:
    return EncoderOptions(
        include_usage=body.include_usage,
        num_top_logprobs=runs[0].submit.params.logprobs,
        return_token_ids=bool(body.return_token_ids),
        prompts_token_ids=tuple(run.submit.prompt_token_ids for run in runs),
        num_choices_per_prompt=body.n or 1,
    )
