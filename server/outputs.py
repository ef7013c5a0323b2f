"""Arithmetic on the outputs that travel from an engine to a client."""

from __future__ import annotations

from whalepod.server.messages import SequenceOutput


def join_outputs(first: SequenceOutput, second: SequenceOutput) -> SequenceOutput:
    """Return two outputs of one sequence, in their order, as one."""
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        num_accepted_drafts=first.num_accepted_drafts + second.num_accepted_drafts,
        num_rejected_drafts=first.num_rejected_drafts + second.num_rejected_drafts,
    )
