"""Heat maps of placements and plots of balance, as SVG, HTML or PNG.

No library draws them: a heat map is rectangles. A PNG has its cells only, without words.
"""

from __future__ import annotations

import html
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whalepod.ep_comm.eplb.placement import balancedness, rank_loads, slot_loads
from whalepod.ep_comm.eplb.policy import Floats, Loads
from whalepod.tools.eplb.files import Placement

_CELL = 14
_LEFT, _TOP, _RIGHT = 70, 60, 90
_STOPS = (0.0, 0.5, 1.0, 2.0, 4.0)
_COLOURS = np.array(
    [(43, 108, 176), (169, 203, 232), (245, 245, 242), (240, 128, 60), (140, 29, 24)], np.float64
)
"""Of a load by the mean: less is blue, more is red."""
_EMPTY = 90
_LINES = ("#3b6fb6", "#d1495b", "#2a9d5c", "#8659b5", "#c98a1b", "#5b5b5b", "#1aa3a3", "#b54a9a")


def slot_shares(placement: Placement, load_LE: Loads) -> Floats:
    """Return `[L, P]`: the load of each slot by the mean slot of its layer; empty slots are NaN."""
    slots_LP = placement.slots_LP
    mean_L = np.maximum(load_LE.sum(axis=1) / slots_LP.shape[1], 1e-9)
    share_LP = slot_loads(slots_LP, load_LE) / mean_L[:, None]
    shares: Floats = np.where(slots_LP >= 0, share_LP, np.nan)
    return shares


def rank_shares(placement: Placement, load_LE: Loads) -> Floats:
    """Return `[D]`: the load of each rank by the mean of those that hold anything; lost: NaN."""
    load_D = rank_loads(placement.slots_LP, load_LE, placement.num_ranks).sum(axis=0)
    alive_D = placement.is_alive_D
    mean = max(float(load_D[alive_D].mean()), 1e-9) if alive_D.any() else 1.0
    shares: Floats = np.where(alive_D, load_D / mean, np.nan)
    return shares


def write_heat_map(path: Path, placement: Placement, load_LE: Loads, title: str) -> None:
    """Write a heat map, layers by slots. Raises ValueError for a suffix that is none of ours."""
    if path.suffix == ".png":
        path.write_bytes(_png(_pixels(placement, load_LE)))
    else:
        write_svg(path, _heat_map(placement, load_LE, title), title)


def write_svg(path: Path, svg: str, title: str) -> None:
    """Write a drawing as `.svg`, or in a page as `.html`."""
    if path.suffix not in (".svg", ".html"):
        raise ValueError(f"{path} must end in .png (heat maps only), .svg or .html")
    page = f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>{svg}\n'
    path.write_text(svg if path.suffix == ".svg" else page, encoding="utf-8")


def _heat_map(placement: Placement, load_LE: Loads, title: str) -> str:
    shares_LP = slot_shares(placement, load_LE)
    num_layers, num_slots = shares_LP.shape
    per_rank = num_slots // placement.num_ranks
    balance_L = balancedness(placement.slots_LP, load_LE, placement.num_ranks)
    share_D = rank_shares(placement, load_LE)
    parts = [_text(_LEFT, 20, title, weight="bold")]
    parts.append(_text(_LEFT, 38, "a cell: load of a slot by its layer's mean (empty: dark grey)"))
    parts += _legend(_LEFT + 420)
    for (layer, slot), share in np.ndenumerate(shares_LP):
        expert = placement.slots_LP[layer, slot]
        tip = f"layer {layer}, rank {slot // per_rank}, slot {slot}: expert {expert}, {share:.2f}"
        x, y = _LEFT + slot * _CELL, _TOP + layer * _CELL
        parts.append(
            f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="{_colour(share)}">'
            f"<title>{tip}</title></rect>"
        )
    bottom, right = _TOP + num_layers * _CELL, _LEFT + num_slots * _CELL
    for rank in range(placement.num_ranks + 1):
        x = _LEFT + rank * per_rank * _CELL
        parts.append(f'<path d="M{x} {_TOP}V{bottom + 34}" stroke="#222"/>')
    for rank, by_mean in enumerate(share_D.tolist()):
        x = _LEFT + rank * per_rank * _CELL
        parts.append(
            f'<rect x="{x}" y="{bottom + 20}" width="{per_rank * _CELL}" height="{_CELL}" '
            f'fill="{_colour(by_mean)}" stroke="#222">'
            f"<title>rank {rank}: {by_mean:.2f} of the mean</title></rect>"
        )
        told = "lost" if np.isnan(by_mean) else f"{by_mean:.2f}"
        parts.append(_text(x + 2, bottom + 48, f"rank {rank}: {told}", size=10))
    every = max(1, num_layers // 32)
    for layer in range(0, num_layers, every):
        y = _TOP + layer * _CELL + _CELL - 3
        parts.append(_text(8, y, f"layer {layer}", size=10))
        parts.append(_text(right + 8, y, f"{balance_L[layer]:.3f}", size=10))
    parts.append(_text(right + 8, _TOP - 6, "balance", size=10))
    return _svg(max(right + _RIGHT, _LEFT + 620), bottom + 60, parts)


def plot(series: Mapping[str, Sequence[tuple[float, float]]], title: str) -> str:
    """Return lines of balancedness (0..1) over steps, one for each name."""
    width, height, points = 760, 320, [p for line in series.values() for p in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)

    def place(x: float, y: float) -> str:
        share = (x - first) / ((last - first) or 1)
        return f"{_LEFT + share * width:.1f},{_TOP + (1 - y) * height:.1f}"

    parts = [_text(_LEFT, 20, title, weight="bold")]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + (1 - tick) * height
        parts.append(f'<path d="M{_LEFT} {y}h{width}" stroke="#ddd"/>')
        parts.append(_text(30, y + 4, f"{tick:.2f}", size=10))
    parts.append(_text(_LEFT, _TOP + height + 18, f"step {first:g}", size=10))
    parts.append(_text(_LEFT + width - 60, _TOP + height + 18, f"step {last:g}", size=10))
    for number, (name, line) in enumerate(series.items()):
        colour = _LINES[number % len(_LINES)]
        dash = ' stroke-dasharray="6 3"' if number >= len(_LINES) else ""
        path = " ".join(place(x, y) for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}"{dash}/>')
        y = _TOP + height + 40 + 16 * number
        parts.append(f'<path d="M{_LEFT} {y - 4}h24" stroke="{colour}"{dash}/>')
        parts.append(_text(_LEFT + 32, y, name))
    return _svg(_LEFT + width + 40, _TOP + height + 56 + 16 * len(series), parts)


def _colour(share: float) -> str:
    if np.isnan(share):
        return f"#{_EMPTY:02x}" + f"{_EMPTY:02x}" * 2
    return "#" + "".join(f"{round(np.interp(share, _STOPS, c)):02x}" for c in _COLOURS.T)


def _legend(x: int) -> list[str]:
    parts = []
    for number, stop in enumerate(_STOPS):
        left = x + 44 * number
        parts.append(
            f'<rect x="{left}" y="26" width="14" height="14" fill="{_colour(stop)}" stroke="#ccc"/>'
        )
        parts.append(_text(left + 18, 38, f"{stop:g}", size=10))
    return parts


def _text(x: float, y: float, words: str, *, size: int = 12, weight: str = "normal") -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}">'
        f"{html.escape(words)}</text>"
    )


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'font-family="sans-serif"><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}'
        "</svg>\n"
    )


def _pixels(placement: Placement, load_LE: Loads) -> NDArray[np.uint8]:
    """Return `[height, width, 3]`: the cells, black lines between ranks, ranks' loads below."""
    shares_LP = slot_shares(placement, load_LE)
    per_rank = shares_LP.shape[1] // placement.num_ranks
    rows = np.vstack([shares_LP, np.repeat(rank_shares(placement, load_LE), per_rank)])
    colours = np.stack([np.interp(np.nan_to_num(rows), _STOPS, c) for c in _COLOURS.T], axis=2)
    colours[np.isnan(rows)] = _EMPTY
    image = colours.astype(np.uint8).repeat(_CELL, axis=0).repeat(_CELL, axis=1)
    image = np.insert(image, len(shares_LP) * _CELL, np.full((_CELL // 2, 1, 3), 255), axis=0)
    image[:, :: per_rank * _CELL] = 0
    return image


def _png(image: NDArray[np.uint8]) -> bytes:
    height, width, _ = image.shape
    raw = np.insert(image.reshape(height, width * 3), 0, 0, axis=1)  # no filter, in each row
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0),
        b"IDAT": zlib.compress(raw.tobytes()),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks.items()
    )
