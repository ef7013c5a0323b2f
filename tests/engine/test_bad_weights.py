"""Weights that are not numbers are found at the start, and named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from whalepod.models.synthetic import synthesize
from whalepod.server.build import build_engine
from whalepod.server.config import DeviceConfig, EngineConfig, ModelSource
from whalepod.server.errors import StartupError


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_I42_a_weight_that_is_not_finite_is_one_sentence(tmp_path: Path, value: float) -> None:
    folder = synthesize("v3-nano", tmp_path / "nano")
    name = "model.layers.1.self_attn.o_proj.weight"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[name][0, 0] = value
    save_file(tensors, file, metadata={"format": "pt"})
    config = EngineConfig(
        source=ModelSource(model=str(folder), dtype="fp32"),
        device=DeviceConfig(kernels="reference", num_threads=1),
    )

    with pytest.raises(StartupError, match=rf"{file.name}: tensor {name} .*holds a NaN") as error:
        build_engine(config)

    assert "\n" not in str(error.value)
