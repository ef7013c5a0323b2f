"""The OpenAPI document and its page, which loads nothing from another host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.staticfiles import StaticFiles

import whalepod
from whalepod.server.gateway.anthropic_schema import CountTokensRequest, MessagesRequest
from whalepod.server.gateway.responses_schema import ResponsesRequest
from whalepod.server.gateway.schema import (
    AbortRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_STATIC = Path(__file__).parent / "static" / "docs"
_REFERENCE = "#/components/schemas/{model}"
_BODIES = (
    *(ChatRequest, CompletionRequest, ResponsesRequest, MessagesRequest),
    *(CountTokensRequest, TokenizeRequest, DetokenizeRequest, AbortRequest),
)

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>whalepod API</title>
<link rel="stylesheet" href="docs/static/swagger-ui.css">
</head>
<body>
<div id="page"></div>
<script src="docs/static/swagger-ui-bundle.js"></script>
<script>
SwaggerUIBundle({url: "openapi.json", dom_id: "#page", validatorUrl: null});
</script>
</body>
</html>
"""


def json_body(schema: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that the route reads by itself."""
    reference = {"$ref": _REFERENCE.format(model=schema.__name__)}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}
    }


def install_docs(app: FastAPI) -> None:
    """Serve `/docs` and complete `/openapi.json` with the schemas of all bodies."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
    app.mount("/docs/static", StaticFiles(directory=_STATIC))
    app.add_api_route("/docs", lambda: HTMLResponse(_PAGE), include_in_schema=False)


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title="whalepod", version=whalepod.__version__, routes=app.routes)
    _, definitions = models_json_schema(
        [(schema, "validation") for schema in _BODIES], ref_template=_REFERENCE
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.update(definitions.get("$defs", {}))
    return document
