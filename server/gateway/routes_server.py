"""Facts about the server and its model, tokens, and `/abort`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

import whalepod
from whalepod.server.errors import EngineLost
from whalepod.server.gateway.api_errors import ApiError, invalid
from whalepod.server.gateway.body import JsonRoute
from whalepod.server.gateway.gateway import Gateway, gateway_of
from whalepod.server.gateway.schema import (
    AbortRequest,
    Messages,
    Schema,
    ShortText,
    TemplateFields,
    TokenId,
)

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(TemplateFields):
    model: ShortText | None = None
    prompt: str | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Schema):
    model: ShortText | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1_000_000)]
    skip_special_tokens: bool | None = None


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, object]:
    """List the names that requests may use."""
    gateway = gateway_of(request)
    return {"object": "list", "data": [_model(gateway, name) for name in gateway.model_names]}


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, object]:
    """Describe one model."""
    gateway = gateway_of(request)
    return _model(gateway, gateway.check_model(name))


def _model(gateway: Gateway, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": gateway.created,
        "owned_by": "whalepod",
        "root": gateway.model_names[0],
        "parent": None,
        "max_model_len": gateway.engine.info.max_model_len,
    }


@router.post("/tokenize")
async def tokenize(request: Request, body: TokenizeRequest) -> dict[str, object]:
    """Return the tokens of a prompt or of a rendered conversation."""
    gateway = gateway_of(request)
    gateway.check_model(body.model)
    return await gateway.tokenizer_pool.run(
        lambda: _tokenized(gateway, body), request.state.num_body_bytes
    )


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> dict[str, object]:
    """Return the text of tokens."""
    gateway = gateway_of(request)
    gateway.check_model(body.model)
    gateway.preparation.prompts.check_vocabulary(body.tokens, "tokens")
    skip = bool(body.skip_special_tokens)
    text = await gateway.tokenizer_pool.run(
        lambda: gateway.tokenizer.decode(body.tokens, skip_special_tokens=skip),
        request.state.num_body_bytes,
    )
    return {"prompt": text}


def _tokenized(gateway: Gateway, body: TokenizeRequest) -> dict[str, object]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages")
    if body.messages is not None:
        token_ids = gateway.preparation.prompts.chat(body.messages, body)
    else:
        limit = gateway.engine.info.max_model_len
        gateway.tokenizer.check_length(body.prompt or "", limit, "prompt")
        adds_bos = body.add_special_tokens is not False
        token_ids = gateway.tokenizer.encode(body.prompt or "", adds_bos=adds_bos)
    answer: dict[str, object] = {
        "count": len(token_ids),
        "max_model_len": gateway.engine.info.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [gateway.tokenizer.printable(i) for i in token_ids]
    return answer


@router.get("/health")
async def health() -> dict[str, object]:
    """Answer while this process lives; `/ready` tells of the engine."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, object]:
    """Ask the engine loop itself; 503 names what did not answer within the deadline."""
    gateway = gateway_of(request)
    if gateway.requests.is_draining:
        raise ApiError("draining", "the server is stopping and takes no new requests")
    if gateway.engine.failure is not None:
        raise ApiError("engine_lost", f"{_engine(gateway)} is lost: {gateway.engine.failure}")
    try:
        stats = await gateway.engine.ping(gateway.config.ready_timeout_s)
    except EngineLost as error:
        raise ApiError("engine_lost", f"{_engine(gateway)} did not answer: {error}") from error
    return {"status": "ready", "running": stats.num_running, "waiting": stats.num_waiting}


def _engine(gateway: Gateway) -> str:
    """Name what serves the gateway; a group's errors name its ranks themselves."""
    return "engine 0" if len(gateway.engine.rank_stats) == 1 else "the group"


@router.get("/version")
async def version() -> dict[str, object]:
    """Return the version of this server."""
    return {"version": whalepod.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all series in Prometheus' text format."""
    return Response(gateway_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.post("/abort")
async def abort(request: Request, body: AbortRequest) -> dict[str, object]:
    """End the live requests with this X-Request-Id that were sent with the same API key."""
    gateway = gateway_of(request)
    owner = getattr(request.state, "key_number", None)
    num_aborted = gateway.requests.abort(body.request_id, owner=owner)
    if not num_aborted:
        message = f"no request of yours with the id {body.request_id!r} is live"
        raise ApiError("not_found", message, "request_id")
    return {"request_id": body.request_id, "num_aborted": num_aborted}
