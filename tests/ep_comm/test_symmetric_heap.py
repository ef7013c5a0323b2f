"""What a rank prepares before it serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import pytest
import torch

from tests.ep_comm.groups import TIMEOUT_MS
from tests.ep_comm.transports import RUNNERS
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.row_kernels import loops, phases
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.symmetric_heap import GroupConfig, SymmetricHeap, warm_up
from whalepod.ep_comm.transport.interface import Transport

Signatures = dict[str, set[tuple[Any, ...]]]
LOOPS = ("destinations", "pack", "spread", "collect", "combine", "add_rows", "unpack")
PHASES = ("send_dispatch", "receive_dispatch", "combine")
WATCHED = [*((loops, name) for name in LOOPS), *((phases, name) for name in PHASES)]
PER_TOKEN = ("loops.add_rows", "loops.unpack")


def watch(monkeypatch: pytest.MonkeyPatch) -> Signatures:
    """Note the types that each compiled loop is called with: it is compiled once for each."""
    found: Signatures = defaultdict(set)

    def noting(name: str, loop: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found[name].add(tuple([numba.typeof(argument) for argument in arguments]))
            return loop(*arguments)

        return call

    for module, name in WATCHED:
        full_name = f"{module.__name__.rpartition('.')[2]}.{name}"
        monkeypatch.setattr(module, name, noting(full_name, getattr(module, name)))
    return found


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_compile_nothing_that_the_warm_up_has_not(
    dtype: RowDtype, is_exact: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = GroupConfig(
        num_ranks=2, ranks_per_node=2, num_experts=8, top_k=4, hidden=16,
        decode_tokens=3, max_tokens=5, dtype=dtype, is_exact=is_exact,
    )  # fmt: skip
    found = watch(monkeypatch)
    warm_up(config)
    warm = {name: set(signatures) for name, signatures in found.items()}
    heap = SymmetricHeap(config, 8)

    def program(transport: Transport) -> None:
        x_TH = torch.ones(2, 16, dtype=getattr(torch, dtype))
        ids_TK, weights_TK = torch.tensor([[0, 7, 1, 5], [2, 3, -1, 6]]), torch.ones(2, 4)
        for exchange in heap.exchanges(Group(transport)).values():
            result = exchange.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
            y = result.rows if result.ranges is None else result.rows.float()
            exchange.combine(y, result.handle, TIMEOUT_MS)

    for transport in ("shm", "faulty"):
        RUNNERS[transport](heap.layout, program, tmp_path)
    assert warm == found
    assert len(found) == len(WATCHED) - is_exact * len(PER_TOKEN), sorted(found)
