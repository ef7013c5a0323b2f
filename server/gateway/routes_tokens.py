"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from whalepod.server.gateway.api_errors import invalid
from whalepod.server.gateway.body import read_json
from whalepod.server.gateway.gateway import Gateway, gateway_of
from whalepod.server.gateway.openapi import json_body
from whalepod.server.gateway.schema import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
async def tokenize(request: Request) -> dict[str, object]:
    """Return the tokens of a prompt or of a rendered conversation."""
    gateway = gateway_of(request)
    body = await read_json(request, TokenizeRequest, gateway.config.max_body_bytes)
    gateway.check_model(body.model)
    return await gateway.offload.run(lambda: _answer(gateway, body))


@router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, object]:
    """Return the text of tokens."""
    gateway = gateway_of(request)
    body = await read_json(request, DetokenizeRequest, gateway.config.max_body_bytes)
    gateway.check_model(body.model)
    gateway.preparation.check_vocabulary(body.tokens, "tokens")
    skip = bool(body.skip_special_tokens)
    text = await gateway.offload.run(
        lambda: gateway.tokenizer.decode(body.tokens, skip_special_tokens=skip)
    )
    return {"prompt": text}


def _answer(gateway: Gateway, body: TokenizeRequest) -> dict[str, object]:
    token_ids = _tokens(gateway, body)
    answer: dict[str, object] = {
        "count": len(token_ids),
        "max_model_len": gateway.upstream.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [gateway.tokenizer.printable(i) for i in token_ids]
    return answer


def _tokens(gateway: Gateway, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.messages is not None:
        return gateway.preparation.chat_tokens(body.messages, body)
    adds_bos = body.add_special_tokens is not False
    return gateway.tokenizer.encode(body.prompt or "", adds_bos=adds_bos)
