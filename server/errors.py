"""Why a request did not get its answer. The gateway maps these to HTTP in one table."""

from __future__ import annotations


class RequestRejected(Exception):
    """The user asked for something that cannot be: refused before it costs anything.

    `code` is machine readable ("context_length_exceeded", "queue_full", "invalid_request", ...);
    `param` names the field of the request, when one is to blame.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


class EngineLost(Exception):
    """The engine process died or stopped answering; live requests are lost, new ones get a 503."""


class RequestRecalled(Exception):
    """The engine gave a request back before it began: it may run elsewhere."""


class StartupError(Exception):
    """The server cannot start; the message is one sentence for the user (exit code 1)."""


class GroupLost(Exception):
    """The ranks of a group can serve no longer; the message is one sentence for the user."""
