"""The OpenAPI document and its page, which loads nothing from another host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

import whalepod
from whalepod.server.gateway.api_errors import ANTHROPIC_PATH, CLIENT_CLOSED_REQUEST
from whalepod.server.gateway.auth import OPEN_PATHS

_STATIC = Path(__file__).parent / "static" / "docs"
_REFERENCE = "#/components/schemas/{model}"


def _object(**properties: Any) -> dict[str, Any]:
    """Describe an object whose properties are all present."""
    return {"type": "object", "properties": properties, "required": list(properties)}


_GENERATING = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
)
_ASKS_WITHOUT_BODY: Final[dict[str, tuple[int, ...]]] = {
    "/ready": (HTTPStatus.SERVICE_UNAVAILABLE,),
    "/v1/responses/{response_id}/input_items": (HTTPStatus.BAD_REQUEST,),
}
_OF_BODIES = (
    HTTPStatus.BAD_REQUEST,
    HTTPStatus.NOT_FOUND,  # the model, or the request to abort
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    HTTPStatus.TOO_MANY_REQUESTS,
    HTTPStatus.SERVICE_UNAVAILABLE,
)
_OF_ANSWERS = (CLIENT_CLOSED_REQUEST, HTTPStatus.GATEWAY_TIMEOUT)
_NULLABLE_TEXT = {"type": ["string", "null"]}
_ERRORS: Final[dict[str, Any]] = {
    "Error": _object(
        error=_object(
            message={"type": "string"},
            type={"type": "string"},
            param=_NULLABLE_TEXT,
            code={"type": "string"},
        )
    ),
    "AnthropicError": _object(
        type={"const": "error"},
        error=_object(type={"type": "string"}, message={"type": "string"}),
        request_id=_NULLABLE_TEXT,
    ),
}
"""What `api_errors` writes."""

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


def install_docs(app: FastAPI, model_names: Sequence[str]) -> None:
    """Serve `/docs`, and complete `/openapi.json` with all answers and model names."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, model_names)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way
    app.mount("/docs/static", StaticFiles(directory=_STATIC))
    app.add_api_route("/docs", lambda: HTMLResponse(_PAGE), include_in_schema=False)


def _document(app: FastAPI, model_names: Sequence[str]) -> dict[str, Any]:
    document = get_openapi(title="whalepod", version=whalepod.__version__, routes=app.routes)
    schemas = document["components"]["schemas"]
    schemas |= _ERRORS
    for schema in schemas.values():
        if "model" in (properties := schema.get("properties", {})):
            properties["model"] = {"type": "string", "enum": list(model_names)}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _describe_answers(path, operation)
    return document


def _describe_answers(path: str, operation: dict[str, Any]) -> None:
    """Add what the route does not say itself: streams, plain text and errors."""
    answers: dict[str, Any] = operation["responses"]
    answers.pop("422", None)  # FastAPI's own check of parameters, which finds nothing here
    if path in _GENERATING:
        answers["200"]["content"]["text/event-stream"] = {}
    if path == "/metrics":
        answers["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    name = "AnthropicError" if path.startswith(ANTHROPIC_PATH) else "Error"
    schema = {"$ref": _REFERENCE.format(model=name)}
    for status in _error_statuses(path, has_body="requestBody" in operation):
        answers[str(int(status))] = {
            "description": _phrase(status),
            "content": {"application/json": {"schema": schema}},
        }


def _error_statuses(path: str, *, has_body: bool) -> Iterator[int]:
    yield HTTPStatus.INTERNAL_SERVER_ERROR
    if path not in OPEN_PATHS:
        yield HTTPStatus.UNAUTHORIZED
    if has_body:
        yield from _OF_BODIES
    if path in _GENERATING:
        yield from _OF_ANSWERS
    if "{" in path:
        yield HTTPStatus.NOT_FOUND
    yield from _ASKS_WITHOUT_BODY.get(path, ())


def _phrase(status: int) -> str:
    return "Client left" if status == CLIENT_CLOSED_REQUEST else HTTPStatus(status).phrase
