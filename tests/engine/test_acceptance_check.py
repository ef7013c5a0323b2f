"""The start-up check tells a layer that guesses from one that does not."""

from __future__ import annotations

import logging

import pytest
from torch import Tensor

from tests.engine.fakes import EOS, FakeMtp, make_core
from whalepod.mtp.depth import FixedDepth
from whalepod.scheduler.config import SchedulerConfig
from whalepod.server.engine.acceptance_check import (
    Acceptance,
    measure_acceptance,
    report_acceptance,
)

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (10,), (11, 12), (13, 14, 15)]
LIMITS = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)


class Broken(FakeMtp):
    """Looks at nothing."""

    def logits(self, hidden_BH: Tensor) -> Tensor:
        return super().logits(hidden_BH * 0.0 + 5.0)


def measure(mtp: FakeMtp) -> Acceptance:
    core = make_core(mtp=mtp, depth=FixedDepth(1))
    found = measure_acceptance(
        core.runner, LIMITS, PROMPTS, num_blocks=64, eos_token_ids=frozenset({EOS})
    )
    assert core.runner.num_sequences == 0
    return found


def test_a_layer_that_guesses_is_no_cause_for_alarm(caplog: pytest.LogCaptureFixture) -> None:
    found = measure(FakeMtp())
    assert found.num_judged > 30
    assert found.num_right > 0.4 * found.num_judged

    with caplog.at_level(logging.INFO):
        report_acceptance(found, layer=61)
    assert "WARNING" not in caplog.text
    assert "of first guesses are right" in caplog.text


def test_a_layer_that_sees_nothing_is_named_with_likely_causes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = measure(Broken())
    assert found.is_near_zero, found

    report_acceptance(found, layer=61)
    for part in ("model.layers.61.*", "missing", "eh_proj", "--speculation off"):
        assert part in caplog.text


def test_too_few_guesses_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    report_acceptance(Acceptance(num_judged=3, num_right=0), layer=61)
    assert not caplog.records
