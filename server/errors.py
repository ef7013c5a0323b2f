"""Why a request did not get its answer. The gateway maps these to HTTP in one table."""

from __future__ import annotations


class EngineLost(Exception):
    """The engine process died or stopped answering; live requests are lost, new ones get a 503."""


class RequestRecalled(Exception):
    """The engine gave a request back before it began: it may run elsewhere."""


class StartupError(Exception):
    """The server cannot start; the message is one sentence for the user (exit code 1)."""


class GroupLost(Exception):
    """The ranks of a group can serve no longer; the message is one sentence for the user."""
