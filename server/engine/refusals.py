"""What an engine says to a request that it does not take."""

from __future__ import annotations

from whalepod.server.messages import Rejected, SequenceOutput, Submit


def failure(request_id: str, error: str) -> SequenceOutput:
    """Return the end of a request that was taken and cannot be run."""
    return SequenceOutput(
        request_id=request_id, index=0, token_ids=(), finish_reason="error", error=error
    )


def rejected(submit: Submit, code: str, message: str) -> Rejected:
    """Return the refusal of a request; `code` is one of `Rejected`'s."""
    return Rejected(request_id=submit.request_id, code=code, message=message)
