"""Who may ask: middleware for API keys, and for servers without any."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Collection, Sequence
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from whalepod.server.errors import StartupError
from whalepod.server.gateway.api_errors import ApiError

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/version", "/docs", "/openapi.json"})
OPEN_FOLDERS = ("/docs/", "/page/")
_KEY = re.compile(r"[\x21-\x7e]+")


def read_keys(given: Sequence[str], file: str | None) -> tuple[str, ...]:
    """Return the given keys and the keys of a file, one a line; `#` begins a comment.

    Raises StartupError, which names no key, for a file that cannot be read or holds none, and for
    a key that no header can carry.
    """
    keys = list(given)
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"the file of API keys, {file}, cannot be read: {error}") from error
        found = [line.strip() for line in lines]
        found = [line for line in found if line and not line.startswith("#")]
        if not found:
            raise StartupError(f"the file of API keys, {file}, holds no key: write one a line")
        keys += found
    for i, key in enumerate(keys):
        if not _KEY.fullmatch(key):
            raise StartupError(
                f"API key {i + 1} is empty or has white space or letters beyond ASCII"
            )
    return tuple(keys)


def given_key(scope: Scope) -> str | None:
    """Return the key that a request shows: OpenAI's header, or Anthropic's; None without."""
    headers = Headers(scope=scope)
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key")


class ApiKeyMiddleware:
    """Ask for one of the keys everywhere but on the open paths; note which one it was."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        count: Callable[[str], None],
        open_paths: Collection[str] = OPEN_PATHS,
        open_folders: tuple[str, ...] = OPEN_FOLDERS,
    ) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]
        self._count = count
        self._open_paths, self._open_folders = open_paths, open_folders

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        number = self._number_of(given_key(scope))
        if number is None:
            self._count("invalid_api_key")
            header = "Authorization: Bearer KEY, or x-api-key: KEY"
            error = ApiError("invalid_api_key", f"a valid API key is needed: {header}")
            await error.response(scope)(scope, receive, send)
            return
        scope.setdefault("state", {})["key_number"] = number
        await self._app(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(self._open_folders)

    def _number_of(self, key: str | None) -> int | None:
        """Compare with every key, in constant time: the answer's delay says nothing."""
        given = _digest(key or "")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return matches.index(True) if key is not None and any(matches) else None


class LocalSiteMiddleware:
    """Refuse what pages of other sites make a browser send to a server that asks for no key.

    A page can have its name point to 127.0.0.1, and can post forms anywhere; the Host and the
    Origin that the browser names give both away.
    """

    def __init__(
        self, app: ASGIApp, origins: Collection[str], count: Callable[[str], None]
    ) -> None:
        """`origins` are allowed besides those of this machine; "*" allows any."""
        self._app, self._origins, self._count = app, origins, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault = self._fault(Headers(scope=scope)) if scope["type"] == "http" else None
        if fault is None:
            await self._app(scope, receive, send)
            return
        self._count("foreign_site")
        message = f"{fault} is not of this machine: start the server with --api-key to serve it"
        await ApiError("foreign_site", message).response(scope)(scope, receive, send)

    def _fault(self, headers: Headers) -> str | None:
        host = headers.get("host")  # HTTP/1.0 may have none, and no browser speaks that
        if host is not None and not _is_of_this_machine(f"//{host}"):
            return f"the host {host[:80]!r}"
        origin = headers.get("origin")
        is_known = origin is None or origin in self._origins or "*" in self._origins
        if origin is not None and not is_known and not _is_of_this_machine(origin):
            return f"the origin {origin[:80]!r}"
        return None


def _is_of_this_machine(url: str) -> bool:
    """Return whether a URL names this machine: no other site has these names."""
    try:
        name = urlsplit(url).hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _digest(key: str) -> bytes:
    """Return bytes of one length for keys of any, so that a comparison hides that, too."""
    return hashlib.sha256(key.encode()).digest()
