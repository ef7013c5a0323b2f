"""OpenAI-shaped errors: the one table that maps failures to HTTP."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final, TypeAlias

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from whalepod.scheduler.limits import RequestRejected
from whalepod.server.errors import EngineLost

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left, for logs only."""

STATUS_OF_CODE: dict[str, int] = {
    "invalid_api_key": HTTPStatus.UNAUTHORIZED,
    "foreign_site": HTTPStatus.FORBIDDEN,
    "model_not_found": HTTPStatus.NOT_FOUND,
    "not_found": HTTPStatus.NOT_FOUND,
    "response_not_found": HTTPStatus.NOT_FOUND,
    "method_not_allowed": HTTPStatus.METHOD_NOT_ALLOWED,
    "body_too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
    "request_timeout": HTTPStatus.REQUEST_TIMEOUT,
    "aborted": CLIENT_CLOSED_REQUEST,
    "client_left": CLIENT_CLOSED_REQUEST,
    "client_too_slow": HTTPStatus.REQUEST_TIMEOUT,
    "queue_full": HTTPStatus.TOO_MANY_REQUESTS,
    "engine_error": HTTPStatus.INTERNAL_SERVER_ERROR,
    "internal_error": HTTPStatus.INTERNAL_SERVER_ERROR,
    "deadline_exceeded": HTTPStatus.GATEWAY_TIMEOUT,
    "draining": HTTPStatus.SERVICE_UNAVAILABLE,
    "engine_lost": HTTPStatus.SERVICE_UNAVAILABLE,
    "compiler_unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
}
"""Every other code is a mistake of the request: 400."""

EXTRA_HEADERS: dict[str, dict[str, str]] = {
    "invalid_api_key": {"www-authenticate": "Bearer"},
    "queue_full": {"retry-after": "1"},
    # it would take as long again: OpenAI's clients repeat a 5xx unless they are told not to
    "deadline_exceeded": {"x-should-retry": "false"},
    "draining": {"retry-after": "5", "connection": "close"},
    "engine_lost": {"retry-after": "5"},
    "compiler_unavailable": {"retry-after": "5"},
    # the rest of the body is not read: the connection cannot carry another request
    "body_too_large": {"connection": "close"},
    "request_timeout": {"connection": "close"},
}


ANTHROPIC_PATH: Final = "/v1/messages"
"""Below it errors have Anthropic's shape."""

ANTHROPIC_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.FORBIDDEN: "permission_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.REQUEST_TIMEOUT: "timeout_error",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "request_too_large",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
    HTTPStatus.SERVICE_UNAVAILABLE: "overloaded_error",
}
"""Every other status below 500 is an invalid_request_error, the rest an api_error."""


class ApiError(RequestRejected):
    """A rejection as an HTTP answer; `code` decides the status."""

    def __init__(
        self,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(code, message, param)
        self.headers = {**EXTRA_HEADERS.get(code, {}), **(headers or {})}

    @property
    def status(self) -> int:
        return STATUS_OF_CODE.get(self.code, HTTPStatus.BAD_REQUEST)

    @property
    def type(self) -> str:
        if self.status == HTTPStatus.TOO_MANY_REQUESTS:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"

    def body(self) -> dict[str, object]:
        """Return the JSON object that OpenAI's clients read."""
        fields = {"message": self.message, "type": self.type, "param": self.param}
        return {"error": {**fields, "code": self.code}}

    def anthropic_body(self, request_id: str | None = None) -> dict[str, object]:
        """Return the JSON object that Anthropic's clients read."""
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        error = {"type": ANTHROPIC_TYPES.get(self.status, other), "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def response(self, scope: Mapping[str, Any] | None = None) -> Response:
        """Return the answer to the request of an ASGI `scope`, in the shape of its API."""
        body = self.body()
        path = scope["path"] if scope else ""
        if scope and (path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")):
            body = self.anthropic_body(scope.get("state", {}).get("request_id"))
        return Response(
            orjson.dumps(body),
            status_code=self.status,
            media_type="application/json",
            headers=self.headers,
        )


def invalid(param: str | None, message: str) -> ApiError:
    """Return the error of a request field that cannot be served as it is."""
    return ApiError("invalid_request", message, param)


def first_fault(errors: Sequence[Any], at: Sequence[str | int] = ()) -> ApiError:
    """Return the first of pydantic's errors as an ApiError that names the field."""
    first = errors[0]
    param = format_path((*at, *first["loc"])) or None
    message = first["msg"].removeprefix("Value error, ")
    return invalid(param, f"{param}: {message}" if param else message)


def format_path(path: Sequence[str | int]) -> str:
    """Write a path the way OpenAI does: `messages[0].content`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def place_of_lone_surrogate(body: bytes) -> str | None:
    """Return the path of the first string that no UTF-8 text can hold, if that is the fault."""
    try:
        data = json.loads(body, parse_constant=_refuse_constant)
    except ValueError:
        return None
    return next((path for path, text in _strings(data, ()) if not _is_encodable(text)), None)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _strings(data: object, path: tuple[str | int, ...]) -> Iterator[tuple[str, str]]:
    if isinstance(data, str):
        yield format_path(path), data
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from _strings(item, (*path, i))
    elif isinstance(data, dict):
        for key, value in data.items():
            yield format_path(path), key
            yield from _strings(value, (*path, key))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_api_error(error: Exception) -> ApiError:
    """Translate a failure of the layers below."""
    match error:
        case ApiError():
            return error
        case RequestRejected():
            return ApiError(error.code, error.message, error.param)
        case EngineLost():
            # its own words are in the log: they are not for clients
            return ApiError("engine_lost", "the engine is not available; the server's log says why")
        case ClientDisconnect():
            return ApiError("client_left", "the client left while it sent its request")
        case RequestValidationError():
            errors = [{**each, "loc": each["loc"][1:]} for each in error.errors()[:1]]
            return first_fault(errors)  # `loc` begins with where FastAPI looked: the body
        case HTTPException():
            return _from_http_exception(error)
    logger.error("unexpected failure", exc_info=error)
    return ApiError("internal_error", "the server failed on this request; its log says why")


def _from_http_exception(error: HTTPException) -> ApiError:
    codes = {HTTPStatus.NOT_FOUND: "not_found", HTTPStatus.METHOD_NOT_ALLOWED: "method_not_allowed"}
    code = codes.get(HTTPStatus(error.status_code), "invalid_request")
    return ApiError(code, error.detail, headers=error.headers)


_KINDS = (
    *(RequestRejected, EngineLost),
    *(RequestValidationError, ClientDisconnect, HTTPException),
)


def install_error_handlers(app: FastAPI, count: Callable[[str], None]) -> None:
    """Give every error answer the shape of its API; `count` gets its code."""

    def answer(request: Request, error: Exception) -> Response:
        api_error = as_api_error(error)
        if api_error.code in ("not_found", "method_not_allowed"):
            api_error.message = f"{request.method} {request.url.path}: {api_error.message}"
        count(api_error.code)
        return api_error.response(request.scope)

    for kind in (*_KINDS, Exception):
        app.add_exception_handler(kind, answer)


FieldNames: TypeAlias = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of chat's field names and what another API calls them; the first that fits counts."""


def field_names(*pairs: tuple[str, str]) -> FieldNames:
    """Compile pairs of a pattern and a replacement."""
    return [(re.compile(rf"^(?:{pattern})(?![a-z_])"), name) for pattern, name in pairs]


@contextmanager
def errors_in(names: FieldNames) -> Iterator[None]:
    """Name the fields of errors inside as the API that was used does."""
    try:
        yield
    except RequestRejected as error:
        raise _renamed(as_api_error(error), names) from None


def _renamed(error: ApiError, names: FieldNames) -> ApiError:
    for pattern, name in names:
        if error.param is not None and pattern.search(error.param):
            message = pattern.sub(name, error.message)
            return ApiError(error.code, message, pattern.sub(name, error.param), error.headers)
    return error
