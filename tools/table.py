"""Plain text tables, and sizes in them."""

from __future__ import annotations

from collections.abc import Sequence


def format_bytes(num_bytes: int) -> str:
    """Return a size in MiB or GiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / 2**20:.1f} MiB"
    return f"{num_bytes / 2**30:,.1f} GiB"


def format_table(rows: Sequence[Sequence[str]], *, numeric: bool = False) -> str:
    """Align columns to their widest cell, two spaces apart; the first row is the heading.

    numeric: all columns but the first are aligned to the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if numeric and i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
