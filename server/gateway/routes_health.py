"""`/health`, `/ready`, `/version` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

import whalepod
from whalepod.server.errors import EngineLost
from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.gateway import Gateway, gateway_of

router = APIRouter()


@router.get("/health")
async def health() -> dict[str, object]:
    """Say that this process lives; `/ready` says whether the engine does."""
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, object]:
    """Ask the engine loop itself; 503 names what did not answer within the deadline."""
    gateway = gateway_of(request)
    if gateway.requests.is_draining:
        raise ApiError("draining", "the server is stopping and takes no new requests")
    if gateway.upstream.failure is not None:
        raise ApiError("engine_lost", f"{_engine(gateway)} is lost: {gateway.upstream.failure}")
    try:
        stats = await gateway.upstream.ping(gateway.config.ready_timeout_s)
    except EngineLost as error:
        raise ApiError("engine_lost", f"{_engine(gateway)} did not answer: {error}") from error
    return {"status": "ready", "running": stats.num_running, "waiting": stats.num_waiting}


def _engine(gateway: Gateway) -> str:
    """Name what is behind the gateway; a group's errors name its ranks themselves."""
    return "engine 0" if len(gateway.upstream.rank_stats) == 1 else "the group"


@router.get("/version")
async def version() -> dict[str, object]:
    """Return the version of this server."""
    return {"version": whalepod.__version__}


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all series in Prometheus' text format."""
    return Response(gateway_of(request).metrics.render(), media_type=CONTENT_TYPE_LATEST)
