"""ASGI middleware: request ids and API keys."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from whalepod.server.gateway.api_errors import ApiError

_OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/docs", "/openapi.json"})
_OPEN_FOLDERS = ("/docs/", "/page/")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def given_key(scope: Scope) -> str | None:
    """Return the key that a request shows: OpenAI's header, or Anthropic's; None without."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


class RequestIdMiddleware:
    """Echo a client's X-Request-Id, or make one. It names a request in logs, never inside."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"

        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = headers["request-id"] = request_id  # Anthropic's name
            await send(message)

        await self._app(scope, receive, send_with_id)


class ApiKeyMiddleware:
    """Ask for one of the keys everywhere but for health, the documentation and the page."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._is_allowed(scope):
            error = ApiError(
                "invalid_api_key", "a valid API key is needed: Authorization: Bearer, or x-api-key"
            )
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path in _OPEN_PATHS or path.startswith(_OPEN_FOLDERS):
            return True
        key = given_key(scope)
        given = (key or "").encode()
        # every key is compared, in constant time: the answer's delay says nothing
        matches = [hmac.compare_digest(given, wanted) for wanted in self._keys]
        return key is not None and any(matches)
