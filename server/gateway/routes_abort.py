"""`/abort`: end one's own requests by their X-Request-Id."""

from __future__ import annotations

from fastapi import APIRouter, Request

from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.body import read_json
from whalepod.server.gateway.gateway import gateway_of
from whalepod.server.gateway.openapi import json_body
from whalepod.server.gateway.schema import AbortRequest

router = APIRouter()


@router.post("/abort", openapi_extra=json_body(AbortRequest))
async def abort(request: Request) -> dict[str, object]:
    """End the live requests with this X-Request-Id that were sent with the same API key."""
    gateway = gateway_of(request)
    body = await read_json(request, AbortRequest, gateway.config.max_body_bytes)
    owner = getattr(request.state, "key_number", None)
    num_aborted = gateway.requests.abort(body.request_id, owner=owner)
    if not num_aborted:
        message = f"no request of yours with the id {body.request_id!r} is live"
        raise ApiError("not_found", message, "request_id")
    return {"request_id": body.request_id, "num_aborted": num_aborted}
