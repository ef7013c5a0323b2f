"""`/v1/responses`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from whalepod.scheduler.plan import TokenLogprob
from whalepod.server.gateway.api_errors import ApiError, invalid
from whalepod.server.gateway.auth import given_key
from whalepod.server.gateway.body import read_json
from whalepod.server.gateway.chat_encoder import chat_logprobs
from whalepod.server.gateway.gateway import Gateway, gateway_of
from whalepod.server.gateway.generation import generate
from whalepod.server.gateway.http_responses import prepare, respond
from whalepod.server.gateway.metrics import RequestTimer
from whalepod.server.gateway.openapi import json_body
from whalepod.server.gateway.renaming import renamed
from whalepod.server.gateway.response_store import Item, StoredResponse
from whalepod.server.gateway.responses_encoder import (
    Ids,
    ResponsesEncoder,
    listed_items,
    place_of,
    response_fields,
)
from whalepod.server.gateway.responses_input import CHAT_NAMES, ResponsesRequest, chat_of, resolved

router = APIRouter()

_LIST_LIMIT = 100


@router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer items, or go on from an earlier response."""
    gateway = gateway_of(request)
    timer = RequestTimer(gateway.metrics)
    body = await read_json(request, ResponsesRequest, gateway.config.max_body_bytes)
    model = gateway.check_model(body.model)
    turn = _Turn(gateway, body, given_key(request.scope))
    with renamed(CHAT_NAMES):
        chat = gateway.scripted(chat_of(body, turn.items, turn.earlier), request.url.path)
        runs = await prepare(request, lambda: gateway.preparation.chat(chat))
        params = runs[0].submit.params
        encoder = ResponsesEncoder(
            response_fields(body, turn.ids, model, params),
            turn.ids,
            turn.keep,
            None if params.logprobs is None else _writer(gateway, params.logprobs),
        )
        events = generate(gateway.upstream, runs, gateway.tokenizer, timer)
        return await respond(request, events, encoder, stream=bool(body.stream))


class _Turn:
    """One request's place among the stored responses of its key."""

    def __init__(self, gateway: Gateway, body: ResponsesRequest, owner: str | None) -> None:
        self.ids = Ids(suffix=secrets.token_hex(16))
        self._store = gateway.stored_responses
        self._body = body
        self._owner = owner
        self.earlier = self._earlier(body.previous_response_id)
        self.items = resolved(body.input, self._find_item)

    def _earlier(self, response_id: str | None) -> list[Item]:
        if response_id is None:
            return []
        stored = self._store.get(self._owner, response_id)
        if stored is None:
            name = "previous_response_id"
            message = f"{name}: no response {response_id[:80]!r} is stored here (any more)"
            raise ApiError("previous_response_not_found", message, name)
        return stored.conversation

    def _find_item(self, item_id: str) -> Item | None:
        """Return an item of a stored answer."""
        place = place_of(item_id)
        stored = self._store.get(self._owner, place[0]) if place else None
        output: Sequence[Item] = stored.response["output"] if stored else ()
        return next((item for item in output if item["id"] == item_id), None)

    def keep(self, response: dict[str, object]) -> None:
        """Store the finished response unless the request forbids it."""
        if self._body.store is False:
            return
        items = listed_items(self.items, self.ids)
        self._store.put(
            self._owner,
            StoredResponse(response=response, input_items=items, earlier_items=self.earlier),
        )


def _writer(gateway: Gateway, num_top: int) -> Callable[[Sequence[TokenLogprob | None]], list[Any]]:
    def write(logprobs: Sequence[TokenLogprob | None]) -> list[Any]:
        content = chat_logprobs(logprobs, num_top, gateway.tokenizer)["content"]
        assert isinstance(content, list)
        return content

    return write


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
