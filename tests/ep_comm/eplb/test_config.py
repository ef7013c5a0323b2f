"""Settings that do not go together are refused with both values."""

from __future__ import annotations

from typing import Any

import pytest

from whalepod.server.build import build_engine
from whalepod.server.config import EngineConfig, EplbConfig
from whalepod.server.errors import StartupError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_redundant_experts": 4}, r"num_redundant_experts \(4\) needs enable_eplb"),
        ({"num_redundant_experts": -1}, "at least 0, got -1"),
        ({"eplb_interval_steps": 0}, "eplb_interval_steps must be at least 1, got 0"),
        ({"eplb_min_gain": 1.5}, r"eplb_min_gain must be in 0\.\.1, got 1\.5"),
    ],
)
def test_settings_of_balancing_are_checked(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EplbConfig(**settings)


def test_one_engine_moves_no_experts() -> None:
    with pytest.raises(StartupError, match="--enable-eplb moves experts between ranks"):
        build_engine(EngineConfig(eplb=EplbConfig(enable_eplb=True)))
