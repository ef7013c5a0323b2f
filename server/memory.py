"""How much memory this process may use, within the limit of its container."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("sys/fs/cgroup")
_UNLIMITED = 1 << 60


def memory_bytes(root: Path = Path("/")) -> tuple[int, int]:
    """Return the memory in all, and what new pages may take without swapping.

    root: where /proc and /sys are
    """
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    if not fields:  # not Linux
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2
    total, available = fields["MemTotal"], fields.get("MemAvailable", fields["MemFree"])
    limit = _read(root / CGROUP / "memory.max").strip()
    if limit.isdigit() and int(limit) < min(total, _UNLIMITED):
        total, available = int(limit), min(available, int(limit) - _used_bytes(root))
    return total, max(0, available)


def _used_bytes(root: Path) -> int:
    """Return what a container uses, without the pages of files that it can drop at once."""
    used = int(_read(root / CGROUP / "memory.current").strip() or 0)
    for line in _read(root / CGROUP / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            used -= int(value)
    return max(0, used)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
