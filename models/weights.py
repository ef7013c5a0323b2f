"""Where a model's tensors come from: a checkpoint, or a seed.

The model asks for each tensor by its Hugging Face name and the shape that it needs, and calls
`finish()` when it has them all. What is missing, left over or of another shape stops the start.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from whalepod.kernels.interface import Kernels, Packed
from whalepod.models.checkpoint_files import (
    CheckpointFiles,
    TensorHeader,
    WeightsError,
    canonical_name,
)
from whalepod.models.config import ModelConfig
from whalepod.models.fp8 import dequantize, scale_shape
from whalepod.models.packed_files import PackedFiles

__all__ = ["CheckpointWeights", "DummyWeights", "Weights", "WeightsError", "is_mtp_tensor"]

SCALE_SUFFIX = "_scale_inv"
GATE_BIAS = "e_score_correction_bias"
_LAYER = re.compile(r"layers\.(\d+)\.")


class Weights(Protocol):
    """Hands out tensors by Hugging Face name (`model.layers.0.input_layernorm.weight`)."""

    bytes_read: int
    """Bytes of the distinct tensors taken so far, as stored, scales included."""

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor `name` in `dtype` (None: the model's).

        The result may be a view of a memory-mapped file: do not write into it. A tensor may be
        taken more than once (tied embeddings, modules that share weights).
        Raises WeightsError when the tensor is missing or does not have `shape`.
        """

    def packed(
        self, name: str, kernels: Kernels, pack: Callable[[], Packed], *, is_expert: bool = False
    ) -> Packed:
        """Return `pack()`, which takes tensors of here, or the same kept from an earlier start.

        name       unique, for people
        is_expert  it belongs to the routed experts of this rank
        """

    def leave(self, name: str) -> None:
        """Note that another rank holds this tensor: it is not read, and `finish` accepts that."""

    def finish(self) -> None:
        """Raise WeightsError if a tensor of the main model was neither taken nor left.

        Tensors of the multi-token-prediction layer may be taken before or after.
        """


def is_mtp_tensor(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to the multi-token-prediction layer.

    That is layer `num_layers` of the checkpoint, whatever prefix the name carries.
    """
    match = _LAYER.match(canonical_name(name))
    return config.num_mtp_layers > 0 and match is not None and int(match[1]) == config.num_layers


class CheckpointWeights:
    """Reads a checkpoint folder in Hugging Face layout; FP8 blocks are dequantised on the way.

    Only the tensors that are taken are read. `progress` is called with (bytes read so far, bytes
    of all files). Raises WeightsError when the folder's files are broken.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        progress: Callable[[int, int], None] | None = None,
        packed_files: PackedFiles | None = None,
    ) -> None:
        self.bytes_read = 0
        self._config = config
        self._dtype = dtype
        self._progress = progress
        self._files = CheckpointFiles(folder)
        self._packed_files = packed_files
        self._taken: list[str] = []
        self._settled: set[str] = set()
        self._read: set[str] = set()
        for name in self._files:
            self._refuse_lone_scale(name)

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        header = self._files.header(name)
        if header.shape != shape:
            raise WeightsError(
                f"{header} has shape {list(header.shape)}, config.json asks for {list(shape)}"
            )
        dtype = dtype or self._dtype
        if self._is_quantized(name, header):
            tensor = self._dequantize(name, header, dtype)
        else:
            tensor = self._read_tensor(name, header).to(dtype)
        self._settle(name)
        self._taken.append(name)
        return tensor

    def packed(
        self, name: str, kernels: Kernels, pack: Callable[[], Packed], *, is_expert: bool = False
    ) -> Packed:
        if self._packed_files is None:
            return pack()

        def make() -> tuple[Packed, list[str]]:
            self._taken = []
            return pack(), self._taken

        packed, names = self._packed_files.get(name, kernels, is_expert, make)
        for tensor in names:
            self._settle(tensor)
            self._count(tensor, self._files.header(tensor))
        return packed

    def save_packed(self) -> None:
        """Keep what was packed for the next start. What is read from here on is not reported."""
        self._progress = None
        if self._packed_files is not None:
            self._packed_files.save()

    def leave(self, name: str) -> None:
        self._files.header(name)
        self._settle(name)

    def finish(self) -> None:
        unexpected = [name for name in self._files if not self._is_accounted_for(name)]
        if unexpected:
            header = self._files.header(unexpected[0])
            more = f" (and {len(unexpected) - 1} more)" if len(unexpected) > 1 else ""
            raise WeightsError(
                f"{header} of shape {list(header.shape)} is unexpected{more}: "
                "the model that config.json describes has no place for it"
            )
        if self._progress:
            self._progress(self._files.num_bytes, self._files.num_bytes)

    def mtp_names(self) -> tuple[str, ...]:
        """Return the stored tensors of the MTP layer, without `model.` in front."""
        return tuple(name for name in self._files if is_mtp_tensor(name, self._config))

    def unused_mtp_names(self) -> tuple[str, ...]:
        """Return those of `mtp_names` that were not taken.

        Its copies of embedding and head do not count: the main model's serve.
        """
        copies = ("embed_tokens.weight", "shared_head.head.weight")
        return tuple(
            name
            for name in self.mtp_names()
            if name not in self._settled and not name.removesuffix(SCALE_SUFFIX).endswith(copies)
        )

    def _is_quantized(self, name: str, header: TensorHeader) -> bool:
        has_scale = name + SCALE_SUFFIX in self._files
        is_fp8 = header.dtype is torch.float8_e4m3fn
        if has_scale and not is_fp8:
            raise WeightsError(f"{header} is {header.dtype} but has a {SCALE_SUFFIX} beside it")
        if is_fp8 and not has_scale:
            raise WeightsError(f"{header} is e4m3 but has no {SCALE_SUFFIX} beside it")
        return is_fp8

    def _dequantize(self, name: str, header: TensorHeader, dtype: torch.dtype) -> Tensor:
        blocks = self._config.fp8
        if blocks is None:
            raise WeightsError(
                f"{header} is e4m3, but config.json has no quantization_config with its block size"
            )
        if len(header.shape) != 2:
            raise WeightsError(f"{header} is e4m3 with shape {list(header.shape)}, not a matrix")
        scale_header = self._files.header(name + SCALE_SUFFIX)
        expected = scale_shape(header.shape, blocks)
        if scale_header.shape != expected or scale_header.dtype is not torch.float32:
            raise WeightsError(
                f"{scale_header} is {scale_header.dtype} {list(scale_header.shape)}; "
                f"a weight of {list(header.shape)} needs torch.float32 {list(expected)}"
            )
        scales = self._read_tensor(name + SCALE_SUFFIX, scale_header)
        return dequantize(self._read_tensor(name, header), scales, blocks, dtype)

    def _read_tensor(self, name: str, header: TensorHeader) -> Tensor:
        tensor = self._files.read(header)
        self._count(name, header)
        return tensor

    def _count(self, name: str, header: TensorHeader) -> None:
        if canonical_name(name) not in self._read:
            self._read.add(canonical_name(name))
            self.bytes_read += header.num_bytes
            if self._progress:
                self._progress(self.bytes_read, self._files.num_bytes)

    def _settle(self, name: str) -> None:
        self._settled |= {canonical_name(name), canonical_name(name) + SCALE_SUFFIX}

    def _is_accounted_for(self, name: str) -> bool:
        return (
            name in self._settled
            or is_mtp_tensor(name, self._config)
            # old conversions store the rotary frequencies, which follow from the config
            or name.endswith("rotary_emb.inv_freq")
            or (name == "lm_head.weight" and self._config.tie_word_embeddings)
        )

    def _refuse_lone_scale(self, name: str) -> None:
        if name.endswith(SCALE_SUFFIX) and name.removesuffix(SCALE_SUFFIX) not in self._files:
            header = self._files.header(name)
            raise WeightsError(f"{header} scales a weight that is not in the checkpoint")


class DummyWeights:
    """Makes seeded random tensors in place of a checkpoint (`--load-format dummy`).

    A tensor's values depend on the seed and its name alone, not on the order of takes, and differ
    between model dtypes by rounding only. Their scale keeps logits and routers from degenerating:
    norms near 1, projections 1 / sqrt(fan in).
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, seed: int) -> None:
        self.bytes_read = 0
        self._dtype = dtype
        self._seed = seed

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Make the tensor as a checkpoint would store it, then in `dtype`; accepts every shape."""
        mean, spread = _moments(canonical_name(name), shape)
        # checkpoints keep the router's bias in f32, whatever their dtype
        stored = torch.float32 if name.endswith(GATE_BIAS) else self._dtype
        tensor = torch.empty(shape, dtype=stored)
        bits = np.random.SFC64(_seed_of(self._seed, canonical_name(name)))
        # in pieces of fixed size, f32 first: small memory, the same values in every dtype
        for piece in torch.split(tensor.view(-1), 1 << 20):
            noise = _uniform(bits, piece.numel())
            piece.copy_(noise.mul_(math.sqrt(3.0) * spread).add_(mean))
        return tensor.to(dtype or self._dtype)

    def packed(
        self, name: str, kernels: Kernels, pack: Callable[[], Packed], *, is_expert: bool = False
    ) -> Packed:
        """Pack: what is made in place is not kept."""
        return pack()

    def leave(self, name: str) -> None:
        """Do nothing: what is not taken is not made."""

    def finish(self) -> None:
        """Do nothing: there is no file that could hold more."""


def _uniform(bits: np.random.SFC64, count: int) -> Tensor:
    """Return f32 values in -1..1 in steps of 2^-15; raw bits are faster than floats."""
    codes = bits.random_raw(-(-count // 4)).view(np.int16)[:count]
    return torch.from_numpy(codes).float().add_(0.5).mul_(2.0**-15)


def _moments(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Return mean and standard deviation of a dummy tensor."""
    if name.endswith(GATE_BIAS):
        return 0.0, 0.02
    if len(shape) == 1:  # the weight of a norm
        return 1.0, 0.1
    if name.endswith("embed_tokens.weight"):
        return 0.0, 1.0
    return 0.0, 1.0 / math.sqrt(shape[-1])


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
