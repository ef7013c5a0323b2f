"""`/v1/models`."""

from __future__ import annotations

from fastapi import APIRouter, Request

from whalepod.server.gateway.gateway import Gateway, gateway_of

router = APIRouter()


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
        "max_model_len": gateway.upstream.info.max_model_len,
    }
