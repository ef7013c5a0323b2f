"""Files of expert loads over time, for work without a server.

A line of JSON (`TraceHeader` and the format's version), then records: step, steps covered, bytes of
the block and its CRC-32 as `<QIII`, then the block: zlib of int64 `[L, E]`, little-endian, tokens
that each expert got in those steps. A record that a killed server has left half written ends the
file; one that is damaged raises TraceError.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from whalepod.ep_comm.eplb.policy import Ints

FORMAT = "whalepod-eplb-trace"
VERSION = 1
_RECORD = struct.Struct("<QIII")


class TraceError(ValueError):
    """The file is no trace, or is damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What was served.

    num_groups  of experts, where the router has groups
    """

    num_layers: int
    num_experts: int
    num_groups: int = 1


class TraceRecord(NamedTuple):
    """The loads of `num_steps` steps that end before `step`; loads_LE int64 `[L, E]`, tokens."""

    step: int
    num_steps: int
    loads_LE: Ints


class TraceWriter:
    """Writes a trace; each record is on its way to the disk when `write` returns."""

    def __init__(self, file: BinaryIO, header: TraceHeader) -> None:
        self._file = file
        self._shape = (header.num_layers, header.num_experts)
        line = json.dumps({"format": FORMAT, "version": VERSION, **asdict(header)})
        file.write(line.encode() + b"\n")
        file.flush()

    def write(self, record: TraceRecord) -> None:
        assert record.loads_LE.shape == self._shape, (record.loads_LE.shape, self._shape)
        block = zlib.compress(record.loads_LE.astype("<i8").tobytes())
        facts = _RECORD.pack(record.step, record.num_steps, len(block), zlib.crc32(block))
        self._file.write(facts + block)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TraceFile:
    """A trace whose number of layers is known with its first record only.

    Raises OSError if the file cannot be made; one that exists is not written over.
    """

    def __init__(self, path: Path, num_groups: int) -> None:
        self._file, self._num_groups = path.open("xb"), num_groups
        self._writer: TraceWriter | None = None

    def write(self, step: int, num_steps: int, loads_LE: Ints) -> None:
        if self._writer is None:
            num_layers, num_experts = loads_LE.shape
            header = TraceHeader(
                num_layers=num_layers, num_experts=num_experts, num_groups=self._num_groups
            )
            self._writer = TraceWriter(self._file, header)
        self._writer.write(TraceRecord(step, num_steps, loads_LE))


def read_header(path: Path) -> TraceHeader:
    """Return what a trace is of. Raises TraceError."""
    with path.open("rb") as file:
        return _read_header(file, path)


def read_trace(path: Path) -> Iterator[TraceRecord]:
    """Yield the records of a trace. Raises TraceError."""
    with path.open("rb") as file:
        header = _read_header(file, path)
        shape = (header.num_layers, header.num_experts)
        while len(facts := file.read(_RECORD.size)) == _RECORD.size:
            step, num_steps, num_bytes, checksum = _RECORD.unpack(facts)
            block = file.read(num_bytes)
            if len(block) < num_bytes:
                return
            if zlib.crc32(block) != checksum:
                raise TraceError(f"{path}: the record of step {step} is damaged")
            loads_LE = np.frombuffer(zlib.decompress(block), "<i8").astype(np.int64)
            if loads_LE.size != shape[0] * shape[1]:
                raise TraceError(
                    f"{path}: the record of step {step} has {loads_LE.size} loads, the header says "
                    f"{shape[0]} layers of {shape[1]} experts"
                )
            yield TraceRecord(step, num_steps, loads_LE.reshape(shape))


def _read_header(file: BinaryIO, path: Path) -> TraceHeader:
    line = file.readline(4096)
    try:
        found = json.loads(line)
        name, version = found.pop("format"), found.pop("version")
        header = TraceHeader(**found)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TraceError(f"{path} is no trace of expert loads: its first line is none") from error
    if (name, version) != (FORMAT, VERSION):
        raise TraceError(
            f"{path} has format {name!r}, version {version}; this program reads {FORMAT!r}, "
            f"version {VERSION}"
        )
    return header
