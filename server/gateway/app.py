"""The HTTP application: routes, middleware and error shapes around one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

import whalepod
from whalepod.server.config import GatewayConfig
from whalepod.server.engine_client import EngineClient
from whalepod.server.gateway import (
    routes_generate,
    routes_messages,
    routes_page,
    routes_responses,
    routes_server,
)
from whalepod.server.gateway.api_errors import install_error_handlers
from whalepod.server.gateway.auth import ApiKeyMiddleware, LocalSiteMiddleware, read_keys
from whalepod.server.gateway.gateway import Gateway
from whalepod.server.gateway.live_requests import LiveRequestMiddleware, RequestIdMiddleware
from whalepod.server.gateway.openapi import install_docs
from whalepod.server.gateway.timers import measuring_lag
from whalepod.server.tokenizer import TextTokenizer

_ROUTES = (routes_generate, routes_responses, routes_messages, routes_server, routes_page)


def create_app(
    config: GatewayConfig,
    engine: EngineClient,
    tokenizer: TextTokenizer,
    *,
    default_params: Mapping[str, float] | None = None,
) -> FastAPI:
    """Build the application.

    `default_params` replaces OpenAI's defaults of sampling parameters (a checkpoint's
    generation_config.json: see `read_default_params`).
    """
    gateway = Gateway(config, engine, tokenizer, default_params or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
        async with measuring_lag(gateway.metrics.loop_lag):
            yield
        await gateway.close()

    app = FastAPI(
        title="whalepod",
        version=whalepod.__version__,
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    app.state.gateway = gateway
    app.state.max_body_bytes = config.max_body_bytes
    for routes in _ROUTES:
        app.include_router(routes.router)
    install_docs(app, gateway.model_names)
    install_error_handlers(app, gateway.metrics.count_error)
    # the last one added is the outermost
    count = gateway.metrics.count_error
    app.add_middleware(LiveRequestMiddleware, requests=gateway.requests, count=count)
    if keys := read_keys(config.api_key, config.api_key_file):
        app.add_middleware(ApiKeyMiddleware, keys=keys, count=count)
    elif config.is_local:
        origins = config.cors_allow_origin
        app.add_middleware(LocalSiteMiddleware, origins=origins, count=count)
    app.add_middleware(RequestIdMiddleware)
    if config.cors_allow_origin:  # outside of the keys: browsers ask without one first
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_allow_origin,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "retry-after"),
        )
    return app
