"""Tells a client what is wrong in the names of the API that it used."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

from whalepod.server.errors import RequestRejected
from whalepod.server.gateway.api_errors import ApiError, as_api_error

Names: TypeAlias = Sequence[tuple[re.Pattern[str], str]]
"""Patterns of chat's field names and what this API calls them; the first that fits counts."""


def names(*pairs: tuple[str, str]) -> Names:
    """Compile pairs of a pattern and a replacement."""
    return [(re.compile(rf"^(?:{pattern})(?![a-z_])"), name) for pattern, name in pairs]


@contextmanager
def renamed(table: Names) -> Iterator[None]:
    """Rename the field that an error inside is about; its message begins with that field."""
    try:
        yield
    except (ApiError, RequestRejected) as error:
        raise _renamed(as_api_error(error), table) from None


def _renamed(error: ApiError, table: Names) -> ApiError:
    for pattern, name in table:
        if error.param is not None and pattern.search(error.param):
            message = pattern.sub(name, error.message)
            return ApiError(error.code, message, pattern.sub(name, error.param), error.headers)
    return error
