"""One HTTP client for the commands that talk to a running server: chat, complete and ps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

DEFAULT_URL = "http://127.0.0.1:8000"
CLIENT_ENV = ("url", "api_key")
"""Fields that `WHALEPOD_*` may set for commands that talk to a server."""


class ClientError(Exception):
    """The server cannot be reached or refused the request; the message is for the user."""


class Client:
    """Talks to one OpenAI-compatible server. Use as a context manager."""

    def __init__(self, url: str, api_key: str | None, *, timeout_s: float = 300.0) -> None:
        """Raises ClientError for an address that is none."""
        import httpx2

        self.url = root_url(url)
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx2.Timeout(timeout_s, connect=min(timeout_s, 5.0))
        try:
            self._http = httpx2.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout,
                verify=self.url.startswith("https:"),  # else 40 ms of certificates for nothing
            )
        except httpx2.InvalidURL as error:
            raise ClientError(f"{self.url} is no address of a server: {error}") from None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str) -> httpx2.Response:
        """Fetch a path; any HTTP status is an answer. Raises ClientError if no server answers."""
        return self._request("GET", path)

    def post(self, path: str, body: dict[str, Any]) -> httpx2.Response:
        """Post a JSON body; the rest is as with `get`."""
        return self._request("POST", path, json=body)

    def _request(self, method: str, path: str, **rest: Any) -> httpx2.Response:
        import httpx2

        try:
            return self._http.request(method, path, **rest)
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None

    def first_model(self) -> str:
        """Name the first model that the server lists."""
        names = model_names(self.get("/v1/models"))
        if not names:
            raise ClientError(f"{self.url}/v1/models lists no model")
        return names[0]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Post a request with `stream: true` and yield its events.

        Raises ClientError with the server's own message on a refusal or an error event.
        """
        import httpx2

        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as response:
                if response.status_code != 200:
                    response.read()
                    raise ClientError(error_message(response))
                yield from events_of(response.iter_lines())
        except httpx2.HTTPError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: Exception) -> ClientError:
        import httpx2

        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return ClientError(
                f"no server answers at {self.url}; start one with `whalepod serve` or pass --url"
            )
        return ClientError(f"{self.url} stopped answering ({type(error).__name__}: {error})")


def root_url(url: str) -> str:
    """Accept `host:port`, a server's root or its `/v1` and return the root."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def model_names(response: httpx2.Response) -> tuple[str, ...]:
    """Return what `/v1/models` lists. Raises ClientError for a refusal, or no such list."""
    if response.status_code != 200:
        raise ClientError(f"/v1/models: {error_message(response)}")
    try:
        return tuple([str(model["id"]) for model in response.json()["data"]])
    except (ValueError, KeyError, TypeError):
        raise ClientError("/v1/models is no list of models") from None


def error_message(response: httpx2.Response) -> str:
    """Return why a server refused, in its own words if it speaks OpenAI's error shape."""
    try:
        message = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = response.text[:200]
    hint = "; pass --api-key" if response.status_code == 401 else ""
    return f"{message} (HTTP {response.status_code}{hint})"


def events_of(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream's lines. Raises ClientError for what is none, or an error."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise ClientError(f"the server sent what is no event: {data[:200]}")
        if "error" in event:
            error = event["error"]
            raise ClientError(
                str(error.get("message", error) if isinstance(error, dict) else error)
            )
        yield event
