"""Ranks compare what they must agree on before they exchange tokens.

Two ranks that differ in, say, the most tokens of a dispatch would write past each other's regions
or wait for ever; here the difference becomes an error that names the field and the ranks.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from whalepod.ep_comm import all_gather
from whalepod.ep_comm.all_gather import AllGather, GatherRegions
from whalepod.ep_comm.group import CallFailed, Group
from whalepod.ep_comm.heap import HeapLayout

PROTOCOL_VERSION = 2
"""Changes with the meaning of anything that ranks write into each other's heaps."""

RECORD_BYTES = 8192


class HandshakeError(RuntimeError):
    """Ranks of a group were started with different settings."""


def reserve(heap: HeapLayout) -> GatherRegions:
    """Reserve the handshake's records. Call it first: its place must not depend on settings."""
    return all_gather.reserve(heap, RECORD_BYTES, "handshake")


def describe(**parts: Any) -> dict[str, str]:
    """Flatten configurations and values into the fields to compare: "part.field" -> text."""
    described = {"protocol_version": str(PROTOCOL_VERSION)}
    for name, part in parts.items():
        if is_dataclass(part):
            described |= {f"{name}.{f.name}": str(getattr(part, f.name)) for f in fields(part)}
        else:
            described[name] = str(part)
    return described


def shake_hands(
    group: Group,
    regions: GatherRegions,
    described: Mapping[str, str],
    timeout_ms: float,
    *,
    number: int = 1,
) -> None:
    """Compare `described` with all ranks'.

    number  above those of earlier handshakes over the same heap, the same on all ranks

    Raises HandshakeError that names every field that differs, with its values and their ranks, and
    CallFailed if a rank does not come within `timeout_ms`. All ranks raise alike.
    """
    text = json.dumps(dict(described), sort_keys=True).encode()
    if len(text) > RECORD_BYTES - 8:
        raise HandshakeError(
            f"the settings to compare take {len(text)} bytes, at most {RECORD_BYTES - 8} fit"
        )
    record = torch.frombuffer(
        bytearray(len(text).to_bytes(8, "little") + text.ljust(RECORD_BYTES - 8)),
        dtype=torch.uint8,
    )
    gather = AllGather(group, regions, "handshake")
    gather.resume(number)
    records, status = gather.gather(record, group.deadline(timeout_ms))
    if not status.ok:
        raise CallFailed(status)
    lines = differences({rank: _decode(found) for rank, found in records.items()})
    if lines:
        raise HandshakeError(
            "ranks were started with different settings:\n  "
            + "\n  ".join(lines)
            + "\nstart all ranks of the group with the same version and flags"
        )


def _decode(record: torch.Tensor) -> dict[str, str]:
    data = record.numpy().tobytes()
    size = int.from_bytes(data[:8], "little")
    decoded = json.loads(data[8 : 8 + size])
    assert isinstance(decoded, dict), type(decoded)
    return decoded


def differences(described: Mapping[int, Mapping[str, str]]) -> list[str]:
    """Return a line for each field whose values differ, with the values and their ranks."""
    lines = []
    for name in sorted({name for one in described.values() for name in one}):
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank in sorted(described):
            ranks_of[described[rank].get(name, "(absent)")].append(rank)
        if len(ranks_of) > 1:
            values = "; ".join(f"{value} on ranks {ranks}" for value, ranks in ranks_of.items())
            lines.append(f"{name}: {values}")
    return lines
