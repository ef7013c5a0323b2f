"""Reads a request body: bounded, checked for depth and encoding, then validated by a schema."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers

from whalepod.server.gateway.api_errors import (
    ApiError,
    first_fault,
    format_path,
    invalid,
    place_of_lone_surrogate,
)
from whalepod.server.gateway.limits import BODY_TIMEOUT_S, MAX_JSON_DEPTH

Schema = TypeVar("Schema", bound=BaseModel)

# possessive and with an optional end quote: linear also on hostile bodies
_JSON_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NO_BRACKET = bytes(set(range(256)) - set(b"[]{}"))
_SQUARE = bytes.maketrans(b"{}", b"[]")
_JSON_HEADERS = Headers({"content-type": "application/json"})


class JsonRoute(APIRoute):
    """A route whose body is read within bounds and decoded strictly before FastAPI checks it.

    What the body claims to be does not matter: it must be JSON. The application's state holds its
    bound, `max_body_bytes`; the request's state gets `num_body_bytes`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle

        async def handle_json(request: Request) -> Response:
            body = await read_body(request, request.app.state.max_body_bytes)
            request.state.num_body_bytes = len(body)
            return await handle(_DecodedRequest(request, check_object(parse_json(body))))

        return handle_json


class _DecodedRequest(Request):
    """A request whose body has been decoded already."""

    def __init__(self, request: Request, data: object) -> None:
        super().__init__(request.scope, request.receive)
        self._data = data

    @property
    def headers(self) -> Headers:
        return _JSON_HEADERS

    async def body(self) -> bytes:
        return b"{}"  # not empty: else FastAPI asks for no JSON

    async def json(self) -> object:
        return self._data


async def read_body(request: Request, max_bytes: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """Collect the body and stop reading as soon as it is too large."""
    declared = request.headers.get("content-length", "")
    size = int(declared[:20]) if declared.isdecimal() else 0
    chunks = []
    if size <= max_bytes:
        size = 0
        try:
            async with asyncio.timeout(timeout_s):
                async for chunk in request.stream():
                    chunks.append(chunk)
                    size += len(chunk)
                    if size > max_bytes:
                        break
        except TimeoutError:
            message = f"the body did not arrive within {timeout_s:g} s"
            raise ApiError("request_timeout", message) from None
    if size > max_bytes:
        raise ApiError("body_too_large", f"the body has more than {max_bytes} bytes")
    return b"".join(chunks)


def parse_json(body: bytes) -> object:
    """Decode JSON strictly: UTF-8, no NaN, no lone surrogates, bounded depth."""
    if is_deeper_than(body, MAX_JSON_DEPTH):
        raise invalid(None, f"the JSON body is nested deeper than {MAX_JSON_DEPTH} levels")
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        param = place_of_lone_surrogate(body)
        where = f"{param}: " if param else ""
        raise invalid(param, f"{where}the body is not valid JSON: {error}") from None


def is_deeper_than(body: bytes, depth: int) -> bool:
    """Return whether brackets nest deeper than `depth`, in linear time and without recursion."""
    brackets = _JSON_STRING.sub(b"", body).translate(_SQUARE, _NO_BRACKET)
    opens = np.frombuffer(brackets, np.uint8) == ord("[")
    levels = np.cumsum(np.where(opens, 1, -1))
    return bool(levels.max(initial=0) > depth)


def validate(schema: type[Schema], data: object, at: Sequence[str | int] = ()) -> Schema:
    """Check `data`, found `at` a path of the body, against the schema.

    The first fault becomes a 400 that names its field.
    """
    try:
        return schema.model_validate(check_object(data, at))
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        raise first_fault(errors, at) from None


def check_object(data: object, at: Sequence[str | int] = ()) -> dict[str, Any]:
    """Return data that is a JSON object; ApiError says what else it is."""
    if not isinstance(data, dict):
        path = format_path(at)
        where = path or "the body"
        raise invalid(path or None, f"{where} must be a JSON object, got {type(data).__name__}")
    return data
