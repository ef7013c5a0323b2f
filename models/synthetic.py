"""Writes random checkpoints that load everywhere: config, tokenizer, sharded safetensors.

The values are those of `DummyWeights`: a bf16 or fp32 checkpoint is the model that
`--load-format dummy` makes of the same seed, and an fp8 checkpoint is quantised from the fp32 one.
"""

from __future__ import annotations

import glob
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from whalepod.models.checkpoint_files import INDEX_NAME
from whalepod.models.config import Fp8Config, ModelConfig, parse_config
from whalepod.models.fp8 import quantize, scale_shape
from whalepod.models.layout import checkpoint_tensors, is_quantizable
from whalepod.models.packed_files import drop_abandoned
from whalepod.models.presets import preset_config
from whalepod.models.synthetic_tokenizer import write_tokenizer
from whalepod.models.weights import GATE_BIAS, SCALE_SUFFIX, DummyWeights

DtypeName = Literal["bf16", "fp8", "fp32"]
MAX_TOKENIZER_VOCAB = 8192


class SynthesisError(ValueError):
    """A checkpoint cannot be written where or as asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTensor:
    """One tensor to make, with its block scales when it is stored in e4m3."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    """As stored, scales included."""

    @property
    def stored_names(self) -> tuple[str, ...]:
        is_fp8 = self.dtype is torch.float8_e4m3fn
        return (self.name, self.name + SCALE_SUFFIX) if is_fp8 else (self.name,)


def synthesize(
    preset: str,
    out: Path,
    *,
    dtype: DtypeName = "bf16",
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
    shard_bytes: int = 2 << 30,
    with_weights: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write the checkpoint `preset` with random weights to the folder `out` and return it.

    overrides     keys of config.json to replace (`smaller` has those of a smaller model)
    shard_bytes   most bytes of one file; also about what is held in memory at a time
    progress      called with (bytes written, bytes in all)
    with_weights  False: config and tokenizer only, for `--load-format dummy`

    The folder appears whole or not at all. Raises SynthesisError when `out` is not empty or the
    disk is too small, ConfigError or ValueError when the sizes make no model.
    """
    raw = preset_config(preset, overrides=overrides)
    raw["torch_dtype"] = "float32" if dtype == "fp32" else "bfloat16"
    if dtype == "fp8":
        raw["quantization_config"] = {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        }
    config = parse_config(raw)
    plan = plan_tensors(config, dtype) if with_weights else []
    with _appearing_folder(out, sum(tensor.num_bytes for tensor in plan)) as folder:
        _write_json(folder / "config.json", raw)
        _write_json(folder / "generation_config.json", _generation_config(raw))
        write_tokenizer(
            folder,
            vocab_size=min(config.vocab_size, MAX_TOKENIZER_VOCAB),
            max_length=config.max_position_embeddings,
        )
        if plan:
            sources = {
                made_in: DummyWeights(config, dtype=made_in, seed=seed)
                for made_in in (torch.float32, torch.bfloat16)
            }
            _write_shards(folder, _shards(plan, shard_bytes), sources, progress)
    return out


def plan_tensors(config: ModelConfig, dtype: DtypeName) -> list[PlannedTensor]:
    """List the tensors of a checkpoint of this configuration, with stored dtypes and sizes."""
    return [_plan(config, name, shape, dtype) for name, shape in checkpoint_tensors(config)]


def _plan(
    config: ModelConfig, name: str, shape: tuple[int, ...], dtype_name: DtypeName
) -> PlannedTensor:
    scale_bytes = 0
    dtype = torch.float32 if dtype_name == "fp32" else torch.bfloat16
    if name.endswith(GATE_BIAS):
        dtype = torch.float32
    elif dtype_name == "fp8" and is_quantizable(name, shape):
        dtype = torch.float8_e4m3fn
        scale_bytes = 4 * math.prod(scale_shape(shape, config.fp8 or Fp8Config()))
    num_bytes = math.prod(shape) * dtype.itemsize + scale_bytes
    return PlannedTensor(name=name, shape=shape, dtype=dtype, num_bytes=num_bytes)


def _shards(plan: Iterable[PlannedTensor], shard_bytes: int) -> list[list[PlannedTensor]]:
    """Cut the plan, in order, into files of at most `shard_bytes` (one tensor at least)."""
    shards: list[list[PlannedTensor]] = [[]]
    size = 0
    for tensor in plan:
        if shards[-1] and size + tensor.num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _write_shards(
    folder: Path,
    shards: list[list[PlannedTensor]],
    sources: Mapping[torch.dtype, DummyWeights],
    progress: Callable[[int, int], None] | None,
) -> None:
    total = sum(tensor.num_bytes for shard in shards for tensor in shard)
    written = 0
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        file_name = f"model-{index:05}-of-{len(shards):05}.safetensors"
        if len(shards) == 1:
            file_name = "model.safetensors"
        tensors = {name: made for planned in shard for name, made in _make(planned, sources)}
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)  # safetensors makes files that only their owner reads
        weight_map |= dict.fromkeys(tensors, file_name)
        written += sum(tensor.num_bytes for tensor in shard)
        if progress:
            progress(written, total)
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX_NAME, index_json)


def _make(
    planned: PlannedTensor, sources: Mapping[torch.dtype, DummyWeights]
) -> Iterator[tuple[str, Tensor]]:
    if planned.dtype is torch.float8_e4m3fn:
        made = quantize(sources[torch.float32].take(planned.name, planned.shape), Fp8Config())
        yield from zip(planned.stored_names, made, strict=True)
    else:
        yield planned.name, sources[planned.dtype].take(planned.name, planned.shape)


def _generation_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    tokens = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True, **tokens}


@contextmanager
def _appearing_folder(out: Path, num_bytes: int) -> Iterator[Path]:
    """Lend a folder beside `out` that becomes `out` at the end, and vanishes on an error."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SynthesisError(f"{out} exists and is not an empty folder; choose another")
    out.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(out.parent).free
    if num_bytes > free_bytes:
        raise SynthesisError(
            f"the checkpoint takes {num_bytes} bytes, {out.parent} has {free_bytes} left; "
            "cut layers or experts, or choose another folder"
        )
    drop_abandoned(out.parent.glob(f"{glob.escape(out.name)}.partial-*"))
    partial = out.with_name(f"{out.name}.partial-{secrets.token_hex(4)}")
    partial.mkdir()
    try:
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
