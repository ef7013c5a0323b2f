"""FP8 block checkpoints load as the products of weights and scales, exactly."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from whalepod.models.config import Fp8Config, load_config
from whalepod.models.fp8 import dequantize, quantize
from whalepod.models.layout import checkpoint_tensors
from whalepod.models.synthetic import synthesize
from whalepod.models.weights import CheckpointWeights, WeightsError

BLOCKS = Fp8Config()
NAME = "model.layers.0.mlp.up_proj.weight"
SCALE = NAME + "_scale_inv"
SHAPE = (256, 128)


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthesize("v3-nano", tmp_path_factory.mktemp("fp8") / "nano", dtype="fp8")


def dequantize_plainly(
    weight_NK: torch.Tensor, scale_RC: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The meaning of the format: w[n, k] * scale[n // 128, k // 128], rounded once."""
    num_rows, num_columns = weight_NK.shape
    rows, columns = torch.arange(num_rows) // 128, torch.arange(num_columns) // 128
    return (weight_NK.float() * scale_RC[rows][:, columns]).to(dtype)


def write_twin(fp8: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Write the same checkpoint without FP8: every scale multiplied into its weight."""
    folder.mkdir()
    raw = json.loads((fp8 / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))
    stored = load_file(fp8 / "model.safetensors")
    twin = {
        name: dequantize_plainly(tensor, stored[name + "_scale_inv"], dtype)
        if name + "_scale_inv" in stored
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv")
    }
    save_file(twin, folder / "model.safetensors")
    return folder


def take_all(folder: Path) -> None:
    config = load_config(folder)
    weights = CheckpointWeights(folder, config, dtype=torch.bfloat16)
    for name, shape in checkpoint_tensors(config):
        weights.take(name, shape)


@pytest.mark.parametrize("shape", [(128, 128), (1, 1), (130, 257), (127, 384), (576, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_is_multiplied_by_the_scale_of_its_block(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    weight_NK = codes.view(torch.float8_e4m3fn)
    scale_RC = torch.rand(-(-shape[0] // 128), -(-shape[1] // 128), generator=generator) + 0.01

    expected = dequantize_plainly(weight_NK, scale_RC, dtype)
    actual = dequantize(weight_NK, scale_RC, BLOCKS, dtype)

    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


def test_other_block_sizes_are_followed() -> None:
    weight_NK = torch.ones(3, 5).to(torch.float8_e4m3fn)
    scale_RC = torch.arange(6.0).view(2, 3)

    actual = dequantize(
        weight_NK, scale_RC, Fp8Config(block_rows=2, block_columns=2), torch.float32
    )

    assert actual.tolist() == [[0, 0, 1, 1, 2], [0, 0, 1, 1, 2], [3, 3, 4, 4, 5]]


def test_quantised_weights_come_back_within_half_a_step_of_e4m3() -> None:
    weight_NK = torch.randn(200, 300, generator=torch.Generator().manual_seed(1))
    weight_NK[:128, :128] = 0.0

    codes_NK, scale_RC = quantize(weight_NK, BLOCKS)
    back_NK = dequantize(codes_NK, scale_RC, BLOCKS, torch.float32)

    assert scale_RC.shape == (2, 3)
    assert back_NK[:128, :128].eq(0).all()
    assert codes_NK.float().abs().amax() == 448
    step_NK = weight_NK.abs() * 2**-4 + scale_RC.amax() * 2**-10
    assert ((back_NK - weight_NK).abs() <= step_NK).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_fp8_checkpoint_loads_as_its_dequantised_twin(
    nano: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    twin = write_twin(nano, tmp_path / "twin", dtype)
    config = load_config(nano)
    quantized = CheckpointWeights(nano, config, dtype=dtype)
    plain = CheckpointWeights(twin, load_config(twin), dtype=dtype)

    for name, shape in checkpoint_tensors(config):
        assert torch.equal(quantized.take(name, shape), plain.take(name, shape)), name
    quantized.finish()
    plain.finish()
    assert quantized.bytes_read < 0.7 * plain.bytes_read


def test_fp8_bytes_include_the_scales(nano: Path) -> None:
    weights = CheckpointWeights(nano, load_config(nano), dtype=torch.bfloat16)

    weights.take(NAME, SHAPE)

    assert weights.bytes_read == 256 * 128 + 2 * 4


def test_embedding_router_norms_and_eh_proj_stay_unquantised(nano: Path) -> None:
    stored = load_file(nano / "model.safetensors")
    quantized = {name for name, tensor in stored.items() if tensor.dtype is torch.float8_e4m3fn}
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in quantized
    assert "model.layers.3.self_attn.kv_a_proj_with_mqa.weight" in quantized
    kept = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "eh_proj", "shared_head")
    assert not [name for name in quantized if any(part in name for part in kept)]


Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(SCALE), rf"{NAME} is e4m3 but has no _scale_inv beside it"),
        (lambda t: t.pop(NAME), rf"{SCALE} scales a weight that is not in the checkpoint"),
        (
            lambda t: t.update({SCALE: torch.ones(1, 2)}),
            rf"{SCALE} is torch.float32 \[1, 2\]; .*\[256, 128\] needs torch.float32 \[2, 1\]",
        ),
        (
            lambda t: t.update({SCALE: torch.ones(2, 1).bfloat16()}),
            rf"{SCALE} is torch.bfloat16 \[2, 1\]; .*needs torch.float32",
        ),
        (
            lambda t: t.update({NAME: t[NAME].to(torch.bfloat16)}),
            rf"{NAME} is torch.bfloat16 but has a _scale_inv beside it",
        ),
        (lambda t: t.update({"model.norm.weight_scale_inv": torch.ones(1)}), "but has a"),
    ],
    ids=["no scale", "no weight", "scale shape", "scale dtype", "bf16 with scale", "norm"],
)
def test_scales_that_do_not_fit_are_named(
    nano: Path, tmp_path: Path, edit: Edit, message: str
) -> None:
    shutil.copy(nano / "config.json", tmp_path)
    tensors = load_file(nano / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(WeightsError, match=message):
        take_all(tmp_path)


def test_fp8_weights_need_a_quantization_config(nano: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(nano, tmp_path / "copy")
    raw = json.loads((folder / "config.json").read_text())
    del raw["quantization_config"]
    (folder / "config.json").write_text(json.dumps(raw))

    weights = CheckpointWeights(folder, load_config(folder), dtype=torch.bfloat16)
    with pytest.raises(WeightsError, match=r"config.json has no quantization_config"):
        weights.take(NAME, SHAPE)
