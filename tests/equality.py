"""The two rules by which tests compare generated text (and the only place that knows them).

A. Our own equalities (batch neighbours, chunk size, prefix hit, preemption, ...), in fp32 and
   batch-invariant mode: ids and logprobs are bit-equal, without excuse. `assert_bit_equal`.
B. Against another implementation, or between fast modes: ids are compared up to the first
   difference. It is excused only where the fp64 oracle cannot decide either: both tokens within
   `LOGIT_GAP` of the best, or a router (expert or group) decided by less than `ROUTER_MARGIN` at or
   before the place, since a flipped expert moves logits by their whole spread. At most
   `MAX_EXCUSED` of the comparisons are excused. `ToleratedDifferences`.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

LOGIT_GAP = 1e-3
ROUTER_MARGIN = 1e-5
MAX_EXCUSED = 0.02


def assert_bit_equal(
    expected_ids: Sequence[int],
    expected_logprobs: Sequence[float],
    actual_ids: Sequence[int],
    actual_logprobs: Sequence[float],
    label: str = "",
) -> None:
    """Rule A for one request; the message shows the first difference."""
    pairs = zip(expected_ids, expected_logprobs, actual_ids, actual_logprobs, strict=False)
    for i, (id_a, logprob_a, id_b, logprob_b) in enumerate(pairs):
        if id_a != id_b or struct.pack("d", logprob_a) != struct.pack("d", logprob_b):
            raise AssertionError(
                f"{label} token {i}: expected id {id_a} (logprob {logprob_a!r}), "
                f"got id {id_b} (logprob {logprob_b!r})"
            )
    lengths = [len(s) for s in (expected_ids, expected_logprobs, actual_ids, actual_logprobs)]
    assert len(set(lengths)) == 1, f"{label} lengths of ids, logprobs, ids, logprobs: {lengths}"


def assert_same_bits(expected: Tensor, actual: Tensor, label: str = "") -> None:
    """Rule A for tensors; NaNs are never equal. The message shows the first difference."""
    assert expected.shape == actual.shape, f"{label} {expected.shape} and {actual.shape}"
    assert expected.dtype == actual.dtype, f"{label} {expected.dtype} and {actual.dtype}"
    differing = (expected != actual).nonzero()
    if len(differing):
        place = tuple(differing[0].tolist())
        raise AssertionError(
            f"{label} {len(differing)} of {expected.numel()} values differ, first at {place}: "
            f"expected {expected[place].item()!r}, got {actual[place].item()!r}"
        )


@dataclass(slots=True)
class ToleratedDifferences:
    """Rule B over many comparisons. Call `finish()` at the end."""

    oracle: Fp64Oracle
    num_compared: int = 0
    excuses: list[str] = field(default_factory=list)

    def compare(
        self, prompt_ids: Sequence[int], expected_ids: Sequence[int], actual_ids: Sequence[int]
    ) -> None:
        """Compare two greedy continuations of a prompt; raise if a difference is not excused."""
        self.num_compared += 1
        same = 0
        while same < min(len(expected_ids), len(actual_ids)):
            if expected_ids[same] != actual_ids[same]:
                context = [*prompt_ids, *expected_ids[:same]]
                self._excuse(context, expected_ids[same], actual_ids[same], same)
                return
            same += 1
        assert len(expected_ids) == len(actual_ids), (
            f"equal up to token {same}, then one of them ends: "
            f"{len(expected_ids)} and {len(actual_ids)} tokens"
        )

    def _excuse(self, context: Sequence[int], expected: int, actual: int, place: int) -> None:
        logits, margin = self.oracle.last_logits_and_margin(context)
        gap = float(logits.max() - torch.minimum(logits[expected], logits[actual]))
        found = f"token {place}: {expected} or {actual}, logit gap {gap:.1e}, margin {margin:.1e}"
        assert gap < LOGIT_GAP or margin < ROUTER_MARGIN, f"not excused: {found}"
        self.excuses.append(found)

    def finish(self) -> None:
        """Print the count of excused differences; raise if there are more than `MAX_EXCUSED`."""
        print(f"{len(self.excuses)} of {self.num_compared} comparisons excused", *self.excuses)
        assert len(self.excuses) <= MAX_EXCUSED * self.num_compared, self.excuses


class Fp64Oracle:
    """A transformers model in fp64 that also tells how narrowly its routers decided."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.deepcopy(model).double().eval()
        self._margins: list[float] = []
        for name, module in self._model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._record)

    @torch.no_grad()
    def last_logits_and_margin(self, token_ids: Sequence[int]) -> tuple[Tensor, float]:
        """Return f64 logits `[V]` after the last token, and the least router margin up to it."""
        self._margins.clear()
        logits = self._model(torch.tensor([list(token_ids)]), use_cache=False).logits
        return logits[0, -1], min(self._margins, default=float("inf"))

    def _record(self, router: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> None:
        bias = getattr(router, "e_score_correction_bias", None)
        logits_TE = outputs[0].double()
        scores_TE = logits_TE.softmax(-1) if bias is None else logits_TE.sigmoid() + bias.double()
        num_groups = 1
        if bias is not None or router.topk_method == "group_limited_greedy":
            num_groups = router.num_group
        if num_groups > 1:
            groups_TGE = scores_TE.unflatten(-1, (num_groups, -1))
            scores_TG = groups_TGE.topk(1 if bias is None else 2, dim=-1).values.sum(-1)
            self._margins.append(_margin(scores_TG, router.topk_group))
            kept_TG = torch.zeros_like(scores_TG, dtype=torch.bool)
            kept_TG.scatter_(1, scores_TG.topk(router.topk_group).indices, True)
            scores_TE = groups_TGE.masked_fill(~kept_TG[..., None], -torch.inf).flatten(-2)
        self._margins.append(_margin(scores_TE, router.top_k))


def _margin(scores: Tensor, count: int) -> float:
    """Return the least distance between the last chosen and the first refused score."""
    if count >= scores.shape[-1]:
        return float("inf")
    best = scores.topk(count + 1, dim=-1).values
    return float((best[..., count - 1] - best[..., count]).min())
