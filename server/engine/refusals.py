"""What an engine says to a request that it does not take."""

from __future__ import annotations

from whalepod.server.messages import Rejected, SequenceOutput, Submit


def failure(rejected: Rejected) -> SequenceOutput:
    """Return a refusal of a request that was taken already."""
    return SequenceOutput(
        request_id=rejected.request_id,
        index=0,
        token_ids=(),
        finish_reason="error",
        error=rejected.message,
    )


def rejected(submit: Submit, code: str, message: str) -> Rejected:
    """Return the refusal of a request; `code` is one of `Rejected`'s."""
    return Rejected(request_id=submit.request_id, code=code, message=message)
