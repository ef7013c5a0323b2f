"""The safetensors files of a checkpoint folder: which tensor lies where, and the bytes behind it.

Files are memory-mapped. Reading a tensor makes a view of the map, and the kernel loads a page when
it is read: a tensor that is never read costs nothing. Pickle files are never opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}


class WeightsError(ValueError):
    """A checkpoint does not hold what the model needs; the message names file and tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a file's header says about one tensor, known before any data is touched."""

    path: Path
    stored_name: str
    """The name in the file, with or without `model.` in front."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.path.name}: tensor {self.stored_name}"


def canonical_name(name: str) -> str:
    """Drop the optional prefix `model.`, so that both spellings of a checkpoint are one."""
    return name.removeprefix("model.")


class CheckpointFiles:
    """Finds tensors by name in one or many safetensors files.

    The index (`model.safetensors.index.json`) says which file holds a tensor; without one the
    headers of all `*.safetensors` files do. Raises WeightsError for every kind of broken folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[Path, Any] = {}
        self._places: dict[str, tuple[Path, str]] = {}
        for path, stored_name in self._listed_tensors():
            name = canonical_name(stored_name)
            if name in self._places:
                other = self._places[name]
                raise WeightsError(
                    f"{path.name}: tensor {stored_name} is also {other[1]} in {other[0].name}; "
                    "a checkpoint must hold each tensor once"
                )
            self._places[name] = (path, stored_name)
        paths = {path for path, _ in self._places.values()}
        self.num_bytes = sum(path.stat().st_size for path in paths)

    def __contains__(self, name: str) -> bool:
        return canonical_name(name) in self._places

    def __iter__(self) -> Iterator[str]:
        """Yield canonical names, in the order of the index or of the headers."""
        return iter(self._places)

    def header(self, name: str) -> TensorHeader:
        """Look a tensor up without touching its data. Raises WeightsError when it is not there."""
        place = self._places.get(canonical_name(name))
        if place is None:
            raise WeightsError(
                f"{self._folder}: tensor {name} is missing; "
                "the files are incomplete or belong to another config.json"
            )
        path, stored_name = place
        where = f"{path.name}: tensor {stored_name}"
        try:
            piece = self._file(path).get_slice(stored_name)
            shape, dtype = tuple(piece.get_shape()), piece.get_dtype()
        except (SafetensorError, ValueError) as error:
            raise WeightsError(f"{where} cannot be found in the file: {error}") from None
        if dtype not in DTYPES:
            raise WeightsError(f"{where} is {dtype}; weights may be {', '.join(DTYPES)}")
        return TensorHeader(path=path, stored_name=stored_name, dtype=DTYPES[dtype], shape=shape)

    def read(self, header: TensorHeader) -> Tensor:
        """Return the tensor as a view of the memory-mapped file."""
        try:
            tensor: Tensor = self._file(header.path).get_tensor(header.stored_name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise WeightsError(f"{header} cannot be read: {error}") from None
        return tensor

    def first_not_finite(self) -> TensorHeader | None:
        """Return the first tensor with a NaN or an infinity, after reading all up to there."""
        headers = map(self.header, self._places)
        return next((h for h in headers if not self.read(h).float().isfinite().all()), None)

    def _listed_tensors(self) -> Iterator[tuple[Path, str]]:
        if (self._folder / INDEX_NAME).is_file():
            return self._tensors_of_index(self._folder / INDEX_NAME)
        return self._tensors_of_headers()

    def _tensors_of_index(self, index: Path) -> Iterator[tuple[Path, str]]:
        for stored_name, file_name in _read_weight_map(index).items():
            if not isinstance(file_name, str) or Path(file_name).name != file_name:
                raise WeightsError(
                    f"{index.name}: tensor {stored_name} is in {file_name!r}, "
                    "which is not the name of a file in the folder"
                )
            path = self._folder / file_name
            if not path.is_file():
                raise WeightsError(
                    f"{index.name}: tensor {stored_name} is in {file_name}, which does not exist "
                    f"in {self._folder}; is the download complete?"
                )
            yield path, stored_name

    def _tensors_of_headers(self) -> Iterator[tuple[Path, str]]:
        paths = sorted(self._folder.glob("*.safetensors"))
        if not paths:
            raise WeightsError(_say_why_empty(self._folder))
        for path in paths:
            for stored_name in self._file(path).offset_keys():
                yield path, stored_name

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError, RuntimeError) as error:
                raise WeightsError(
                    f"{path.name} is not a whole safetensors file ({error}); download it again"
                ) from None
        return self._open[path]


def _read_weight_map(index: Path) -> dict[str, Any]:
    try:
        raw = json.loads(index.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{index.name} cannot be read: {error}") from None
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index.name} has no weight_map from tensor names to file names")
    return weight_map


def _say_why_empty(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds {pickles[0]} but no *.safetensors file; pickle files can run code "
            "and are never opened: convert them to safetensors"
        )
    return f"{folder} holds no *.safetensors file"
