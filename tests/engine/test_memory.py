"""What a process may use: the machine's memory, or its container's."""

from __future__ import annotations

from pathlib import Path

import pytest

from whalepod.server.memory import memory_bytes

GIB = 1 << 30
MEMINFO = f"MemTotal: {64 << 20} kB\nMemFree: {20 << 20} kB\nMemAvailable: {40 << 20} kB\n"


def machine(root: Path, **cgroup: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(MEMINFO)
    folder = root / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    for name, text in cgroup.items():
        (folder / name.replace("_", ".")).write_text(text)
    return root


@pytest.mark.parametrize("limit", ["max\n", f"{100 * GIB}\n"])
def test_a_container_without_a_limit_has_the_machines_memory(tmp_path: Path, limit: str) -> None:
    root = machine(tmp_path, memory_max=limit, memory_current=f"{GIB}\n")
    assert memory_bytes(root) == (64 * GIB, 40 * GIB)


def test_a_containers_limit_counts_and_pages_of_files_are_no_use_of_it(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        memory_max=f"{8 * GIB}\n",
        memory_current=f"{5 * GIB}\n",
        memory_stat=f"anon {2 * GIB}\ninactive_file {3 * GIB}\n",
    )
    assert memory_bytes(root) == (8 * GIB, 6 * GIB)


def test_a_full_container_has_nothing_left(tmp_path: Path) -> None:
    root = machine(tmp_path, memory_max=f"{GIB}\n", memory_current=f"{2 * GIB}\n")
    assert memory_bytes(root) == (GIB, 0)


def test_this_machine_has_memory() -> None:
    total, available = memory_bytes()
    assert 0 < available <= total
