"""The HTTP application: routes, middleware and error shapes around one engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI

import whalepod
from whalepod.server.config import GatewayConfig
from whalepod.server.gateway import (
    routes_generate,
    routes_health,
    routes_messages,
    routes_models,
    routes_page,
    routes_responses,
    routes_tokens,
)
from whalepod.server.gateway.api_errors import install_error_handlers
from whalepod.server.gateway.auth import ApiKeyMiddleware, RequestIdMiddleware
from whalepod.server.gateway.gateway import Gateway
from whalepod.server.gateway.openapi import install_docs
from whalepod.server.gateway.tokenizer import TextTokenizer
from whalepod.server.upstream import Upstream


def create_app(
    config: GatewayConfig,
    upstream: Upstream,
    tokenizer: TextTokenizer,
    *,
    default_params: Mapping[str, float] | None = None,
) -> FastAPI:
    """Build the application.

    `default_params` replaces OpenAI's defaults of sampling parameters (a checkpoint's
    generation_config.json: see `read_default_params`).
    """
    gateway = Gateway(config, upstream, tokenizer, default_params or {})

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None, None]:
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
    for routes in (
        *(routes_generate, routes_responses, routes_messages),
        *(routes_models, routes_tokens, routes_health, routes_page),
    ):
        app.include_router(routes.router)
    install_docs(app)
    install_error_handlers(app, gateway.metrics.count_error)
    # the last one added is the outermost
    if config.api_key:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_key)
    app.add_middleware(RequestIdMiddleware)
    return app
