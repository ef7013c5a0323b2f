"""The Responses API: new responses and stored ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from whalepod.server.gateway.api_errors import ApiError, errors_in, invalid
from whalepod.server.gateway.auth import given_key
from whalepod.server.gateway.body import JsonRoute
from whalepod.server.gateway.chat_encoder import logprobs_writer
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.generation import PromptRun
from whalepod.server.gateway.http_responses import answer
from whalepod.server.gateway.response_store import ResponseContext, StoredResponse
from whalepod.server.gateway.responses_encoder import ResponsesEncoder, response_fields
from whalepod.server.gateway.responses_input import (
    CHAT_NAMES,
    ResponsesRequest,
    chat_of_items,
)
from whalepod.server.gateway.responses_items import Item

router = APIRouter(route_class=JsonRoute)

_LIST_LIMIT = 100


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

    with errors_in(CHAT_NAMES):
        num_bytes = context.num_bytes
        return await answer(
            request, chat, new_encoder, stream=body.stream, num_stored_bytes=num_bytes
        )


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(request: Request) -> Response:
    """Say that conversations are not shortened here; else the id's route would answer."""
    raise ApiError("not_found", "conversations are not compacted here")


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    """Return a stored response."""
    return dict(_stored(request, response_id).response)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, object]:
    """Forget a stored response."""
    if not gateway_of(request).stored_responses.delete(given_key(request.scope), response_id):
        raise _not_found(response_id)
    return {"id": response_id, "object": "response", "deleted": True}


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    request: Request,
    response_id: str,
    limit: Annotated[str, Query()] = "20",
    order: Annotated[str, Query()] = "desc",
    after: Annotated[str | None, Query()] = None,
) -> dict[str, object]:
    """List what was asked of a stored response, earlier turns included."""
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= _LIST_LIMIT):
        raise invalid("limit", f"limit must be in 1..{_LIST_LIMIT}, got {limit[:40]!r}")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order must be asc or desc, got {order[:40]!r}")
    stored = _stored(request, response_id)
    items = [*stored.earlier_items, *stored.input_items][:: 1 if order == "asc" else -1]
    if after is not None:
        items = items[_position(items, after) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def _position(items: Sequence[Item], item_id: str) -> int:
    for i, item in enumerate(items):
        if item["id"] == item_id:
            return i
    raise invalid("after", f"after: no item has the id {item_id[:80]!r}")


def _stored(request: Request, response_id: str) -> StoredResponse:
    stored = gateway_of(request).stored_responses.get(given_key(request.scope), response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        "response_not_found", f"no response {response_id[:80]!r} is stored here (any more)"
    )
