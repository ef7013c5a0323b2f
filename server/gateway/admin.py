"""The routes of the server's operator, on a port and with keys of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final, Literal

from fastapi import APIRouter, FastAPI, Request

import whalepod
from whalepod.server.gateway.api_errors import ApiError, install_error_handlers
from whalepod.server.gateway.auth import ApiKeyMiddleware
from whalepod.server.gateway.body import JsonRoute
from whalepod.server.gateway.gateway import Gateway, gateway_of
from whalepod.server.gateway.live_requests import RequestIdMiddleware
from whalepod.server.gateway.schema import AbortRequest, Schema

MAX_BODY_BYTES: Final = 1024 * 1024

router = APIRouter(route_class=JsonRoute)


class LogLevelRequest(Schema):
    level: Literal["debug", "info", "warning", "error"]


class PlacementRequest(Schema):
    """The expert in each slot, by layer; null: as the loads say."""

    slots: list[list[int]] | None = None


@router.get("/health")
async def health() -> dict[str, object]:
    """Answer while this process lives."""
    return {"status": "ok"}


@router.get("/requests")
async def list_requests(request: Request) -> dict[str, object]:
    """List the live requests, oldest first."""
    requests, now_s = gateway_of(request).requests, time.monotonic()
    rows = [
        {
            "request_id": live.request_id,
            "path": live.path,
            "age_s": round(now_s - live.arrived_s, 3),
        }
        for live in requests
    ]
    return {"is_draining": requests.is_draining, "requests": rows}


@router.post("/abort")
async def abort(request: Request, body: AbortRequest) -> dict[str, object]:
    """End anybody's requests with this X-Request-Id."""
    num_aborted = gateway_of(request).requests.abort(body.request_id, any_owner=True)
    if not num_aborted:
        raise ApiError("not_found", f"no request with the id {body.request_id!r} is live")
    return {"request_id": body.request_id, "num_aborted": num_aborted}


@router.post("/drain")
async def drain(request: Request) -> dict[str, object]:
    """Take no new requests (503, also from /ready) until `/resume`; running ones go on."""
    return _set_draining(request, True)


@router.post("/resume")
async def resume(request: Request) -> dict[str, object]:
    """Take requests again."""
    return _set_draining(request, False)


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> dict[str, object]:
    """Forget the cached texts that no live request uses."""
    gateway = gateway_of(request)
    gateway.engine.reset_prefix_cache()
    stats = await gateway.engine.ping(gateway.config.ready_timeout_s)
    return {"num_cached_blocks": stats.num_cached_blocks}


@router.get("/experts")
async def experts(request: Request) -> dict[str, object]:
    """Return where experts are and what load they had."""
    found = gateway_of(request).engine.experts
    if found is None:
        raise ApiError("not_found", "experts do not move, or no request was served yet")
    return asdict(found)


@router.post("/experts")
async def place_experts(request: Request, body: PlacementRequest) -> dict[str, object]:
    """Move experts to other slots, from the next step on."""
    engine = gateway_of(request).engine
    slots = tuple(map(tuple, body.slots or ()))
    held = None if engine.experts is None else engine.experts.slots
    if held is not None and slots and [*map(len, slots)] != [*map(len, held)]:
        raise ApiError(
            "invalid_request",
            f"slots must be {len(held)} layers of {len(held[0])}, got {len(slots)} layers of "
            f"{sorted(set(map(len, slots)))}",
        )
    engine.place_experts(slots)
    return {"num_layers": len(slots)}


@router.post("/log_level")
async def set_log_level(body: LogLevelRequest) -> dict[str, object]:
    """Change how much the gateway's process logs."""
    logging.getLogger("whalepod").setLevel(body.level.upper())
    return {"level": body.level}


def _set_draining(request: Request, is_draining: bool) -> dict[str, object]:
    requests = gateway_of(request).requests
    requests.is_draining = is_draining
    return {"is_draining": is_draining, "num_live": len(requests)}


def create_admin_app(gateway: Gateway, keys: Sequence[str]) -> FastAPI:
    """Build the application of the admin port. Everything but `/health` needs one of `keys`."""
    if not keys:
        raise ValueError("the admin routes need a key")
    app = FastAPI(
        title="whalepod admin",
        version=whalepod.__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.gateway = gateway
    app.state.max_body_bytes = MAX_BODY_BYTES
    app.include_router(router)
    install_error_handlers(app, gateway.metrics.count_error)
    app.add_middleware(
        ApiKeyMiddleware,
        keys=keys,
        count=gateway.metrics.count_error,
        open_paths={"/health"},
        open_folders=(),
    )
    app.add_middleware(RequestIdMiddleware)
    return app
