"""What a rank prepares before it serves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numba
import pytest
import torch

from tests.ep_comm.groups import TIMEOUT_MS, run_loopback
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.modes.low_latency import LowLatency
from whalepod.ep_comm.row_kernels import loops
from whalepod.ep_comm.rows import RowDtype
from whalepod.ep_comm.traffic import GroupHeap, Traffic, warm_up
from whalepod.ep_comm.transport.interface import Transport

Signatures = dict[str, set[tuple[Any, ...]]]
LOOPS = ("destinations", "pack", "spread", "collect", "combine", "add_rows", "unpack")
OF_THROUGHPUT = ("add_rows", "unpack")


def watch(monkeypatch: pytest.MonkeyPatch) -> Signatures:
    """Note the types that each compiled loop is called with: it is compiled once for each."""
    found: Signatures = defaultdict(set)

    def noting(name: str, loop: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            found[name].add(tuple([numba.typeof(argument) for argument in arguments]))
            return loop(*arguments)

        return call

    for name in LOOPS:
        monkeypatch.setattr(loops, name, noting(name, getattr(loops, name)))
    return found


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_steps_compile_nothing_that_the_warm_up_has_not(
    dtype: RowDtype, is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    traffic = Traffic(
        num_ranks=2, ranks_per_node=2, num_experts=8, num_choices=4, hidden=16,
        decode_tokens=3, max_tokens=5, dtype=dtype, is_exact=is_exact,
    )  # fmt: skip
    found = watch(monkeypatch)
    warm_up(traffic)
    warm = {name: set(signatures) for name, signatures in found.items()}
    heap = GroupHeap(traffic, 8)

    def program(transport: Transport) -> None:
        x_TH = torch.ones(2, 16, dtype=getattr(torch, dtype))
        ids_TK, weights_TK = torch.tensor([[0, 7, 1, 5], [2, 3, -1, 6]]), torch.ones(2, 4)
        for mode in heap.modes(Group(transport)).values():
            if isinstance(mode, LowLatency):
                result = mode.dispatch(x_TH, ids_TK, TIMEOUT_MS)
                mode.combine(result.rows.float(), result.handle, weights_TK, TIMEOUT_MS)
            else:
                received = mode.dispatch(x_TH, ids_TK, weights_TK, TIMEOUT_MS)
                mode.combine(received.x_NH, received.routing, TIMEOUT_MS)

    run_loopback(heap.layout, program)
    assert warm == found
    assert all(found[name] for name in LOOPS if not (is_exact and name in OF_THROUGHPUT))
