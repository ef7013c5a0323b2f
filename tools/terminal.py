"""`whalepod chat` and `whalepod complete`: a running server in the terminal, streamed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from whalepod.tools.client import DEFAULT_URL, Client, ClientError


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    url: Annotated[str, "the server to talk to"] = DEFAULT_URL
    api_key: Annotated[str | None, "its key, if it asks for one"] = None
    model: Annotated[str | None, "model to ask for; default: the first that it lists"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    max_tokens: Annotated[int | None, "longest answer; default: what the server allows"] = None
    temperature: Annotated[float | None, "0 is greedy; default: the server's"] = None
    top_p: Annotated[float | None, "nucleus sampling; default: the server's"] = None
    seed: Annotated[int | None, "makes sampled answers repeatable"] = None

    def body(self) -> dict[str, Any]:
        """The chosen fields as a request has them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatConfig:
    server: ServerAddress
    sampling: Sampling
    system: Annotated[str | None, "system prompt"] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteConfig:
    prompt: Annotated[str, "text to continue; - reads it from stdin"]
    server: ServerAddress
    sampling: Sampling


class Conversation:
    """The messages so far, and how the next answer is asked for."""

    def __init__(self, client: Client, model: str, config: ChatConfig) -> None:
        self._client, self._model, self._config = client, model, config
        self.messages: list[dict[str, str]] = []
        self.clear()

    def clear(self) -> None:
        """Forget all but the system prompt."""
        system = self._config.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Iterator[str]:
        """Yield the pieces of the answer; what was yielded is kept as the answer.

        A question whose answer fails before its first piece is forgotten.
        """
        self.messages.append({"role": "user", "content": text})
        body = {
            "model": self._model,
            "messages": list(self.messages),
            **self._config.sampling.body(),
        }
        answer: list[str] = []
        try:
            for event in self._client.stream("/v1/chat/completions", body):
                for choice in event.get("choices", ()):
                    if piece := choice["delta"].get("content"):
                        answer.append(piece)
                        yield piece
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()


def chat(config: ChatConfig) -> int:
    """Chat with a running server in the terminal.

    /clear forgets the conversation, /exit leaves, Ctrl-C stops an answer.
    """
    with Client(config.server.url, config.server.api_key) as client:
        model = config.server.model or client.first_model()
        conversation = Conversation(client, model, config)
        if sys.stdin.isatty():
            print(f"{model} at {client.url}; /clear forgets, /exit leaves, Ctrl-C stops an answer")
        while (line := _read_line()) is not None:
            if line in ("/exit", "/quit"):
                break
            if line == "/clear":
                conversation.clear()
            elif line.startswith("/"):
                print(f"unknown command {line!r}; there are /clear and /exit", file=sys.stderr)
            elif line:
                _answer(conversation, line)
    return 0


def _answer(conversation: Conversation, line: str) -> None:
    """Print one answer. A person at the terminal may go on after a refusal; a script may not."""
    try:
        _print_stream(conversation.ask(line))
    except ClientError as error:
        if not sys.stdin.isatty():
            raise
        print(f"whalepod: {error}", file=sys.stderr)


def complete(config: CompleteConfig) -> int:
    """Print a running server's completion of PROMPT (read from stdin if it is `-`)."""
    prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    with Client(config.server.url, config.server.api_key) as client:
        model = config.server.model or client.first_model()
        body = {"model": model, "prompt": prompt, **config.sampling.body()}
        events = client.stream("/v1/completions", body)
        _print_stream(
            choice.get("text", "") for event in events for choice in event.get("choices", ())
        )
    return 0


def _read_line() -> str | None:
    """Return the next line; None at the end of input or on Ctrl-C at the prompt."""
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        import readline  # noqa: F401  (arrow keys and history in input())
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _print_stream(pieces: Iterator[str]) -> None:
    """Print pieces as they come; Ctrl-C closes the stream, which stops the answer."""
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
        print()
    except KeyboardInterrupt:
        print(" [stopped]")
    finally:
        if close := getattr(pieces, "close", None):
            close()
