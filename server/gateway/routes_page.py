"""The web page at `/`: files of the package, read once, served from memory.

A request names a key of a fixed table and never a path, so nothing outside it can be reached.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request, Response

from whalepod.server.gateway.api_errors import ApiError
from whalepod.server.gateway.cluster_status import cluster_status
from whalepod.server.gateway.gateway import gateway_of

FOLDER = Path(__file__).parent / "static" / "page"
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""No other host is ever asked, whatever a model's answer contains."""

_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # kept by browsers, asked for again each time: a new version shows at once
    "cache-control": "no-cache",
}
_CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}

router = APIRouter()


@dataclass(frozen=True, slots=True, kw_only=True)
class PageFile:
    """One file of the page, as it is sent."""

    body: bytes
    content_type: str
    etag: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return all files of the page by their path below it, with `/` between the parts."""
    paths = [path for path in FOLDER.rglob("*") if path.is_file()]
    return {path.relative_to(FOLDER).as_posix(): _read(path) for path in paths}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    digest = hashlib.sha256(body).hexdigest()[:32]
    return PageFile(body=body, content_type=_CONTENT_TYPES[path.suffix], etag=f'"{digest}"')


@router.get("/", include_in_schema=False)
async def index(request: Request) -> Response:
    """Return the page."""
    return _answer(request, page_files()["index.html"])


@router.get("/page/{name:path}", include_in_schema=False)
async def page_file(request: Request, name: str) -> Response:
    """Return one of the files that the page loads."""
    file = page_files().get(name)
    if file is None:
        raise ApiError("not_found", "the page has no such file")
    return _answer(request, file)


@router.get("/cluster")
async def cluster(request: Request) -> dict[str, object]:
    """Return facts and counters of the model and its engine: what the page shows."""
    return cluster_status(gateway_of(request))


def _answer(request: Request, file: PageFile) -> Response:
    headers = {**_HEADERS, "etag": file.etag}
    known = [tag.strip().removeprefix("W/") for tag in _known_tags(request)]
    if file.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.body, headers={**headers, "content-type": file.content_type})


def _known_tags(request: Request) -> list[str]:
    return request.headers.get("if-none-match", "").split(",")
