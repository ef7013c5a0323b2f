"""The adapter to DeepEP, against a stand-in with DeepEP's signatures that runs our own mode."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ep_comm import test_low_latency as case
from tests.ep_comm.groups import TIMEOUT_MS, run_loopback
from tests.equality import assert_same_bits
from whalepod.ep_comm.group import Group
from whalepod.ep_comm.modes.deep_ep import DeepEpLowLatency, open_buffer
from whalepod.ep_comm.modes.low_latency import LiveResultError, LowLatency
from whalepod.ep_comm.transport.interface import Transport


class StandIn:
    """`deep_ep.Buffer` (V1) in low-latency mode."""

    def __init__(self, mode: LowLatency) -> None:
        self._mode = mode

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, tuple[Any, ...], None, Callable[[], None]]:
        config = self._mode.config
        assert (num_max_dispatch_tokens_per_rank, num_experts) == (
            config.max_tokens,
            config.num_experts,
        )
        assert use_fp8 == (config.dispatch_dtype == "float8")
        assert return_recv_hook
        assert not async_finish
        output = self._mode._outputs[(self._mode._epoch + 1) % 2]
        count_E = torch.zeros(config.num_local, dtype=torch.int32)
        ranges_ER = torch.zeros(config.num_local, config.num_ranks, dtype=torch.int64)
        flight = self._mode.send_dispatch(x, topk_idx)
        found: list[Any] = []

        def hook() -> None:
            result = flight.receive(TIMEOUT_MS)
            found.append(result.handle)
            count_E.copy_(result.count_E)
            ranges_ER.copy_(result.ranges_ER)

        received = (output.rows, output.scales) if use_fp8 else output.rows
        handle = (output.source_info, ranges_ER, config.max_tokens, config.hidden, found)
        return received, count_E, handle, None, hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, None, Callable[[], None]]:
        assert x.dtype is torch.bfloat16
        assert return_recv_hook
        y_TH = torch.full((len(topk_idx), x.shape[-1]), torch.nan, dtype=torch.bfloat16)
        flight = self._mode.send_combine(x, handle[-1][0])

        def hook() -> None:
            y_TH.copy_(flight.receive(topk_weights, TIMEOUT_MS)[0])

        return y_TH, None, hook


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_results_are_those_of_our_own_mode(dtype: str) -> None:
    config = case.make_config(
        2, dispatch_dtype=dtype, combine_dtype="bfloat16", hidden=128, column_major=True
    )
    heap, regions = case.make_heap(config)
    program = case.Round(config, regions, (), dtype=torch.bfloat16)

    def run(transport: Transport) -> None:
        rank = transport.rank
        adapter = DeepEpLowLatency(
            StandIn(LowLatency(Group(transport), config, regions, poison_unused=True)), config
        )
        for seed in range(4):
            inputs = program.inputs(seed)
            mine = inputs[rank]
            result = adapter.dispatch(mine.x_TH, mine.ids_TK, TIMEOUT_MS)
            case.check_dispatched(result, inputs, config, rank)
            y = case.scale_by_expert(result, config, rank).bfloat16()
            y_TH, status = adapter.combine(y, result.handle, mine.weights_TK, TIMEOUT_MS)
            assert status.ok
            assert_same_bits(case.expected_sum(mine, config), y_TH)

    run_loopback(heap, run)


def test_what_deep_ep_cannot_do_is_refused() -> None:
    def adapter(**changes: object) -> DeepEpLowLatency:
        fields: dict[str, object] = {"dispatch_dtype": "bfloat16", "combine_dtype": "bfloat16"}
        return DeepEpLowLatency(None, case.make_config(2, **(fields | changes)))

    with pytest.raises(ValueError, match="output packed"):
        adapter(output="packed")
    with pytest.raises(ValueError, match="sends bfloat16 or float8"):
        adapter(dispatch_dtype="float32")
    with pytest.raises(ValueError, match="set column_major"):
        adapter(dispatch_dtype="float8", hidden=128)
    ids_TK = torch.zeros(7, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"7 tokens .* at most 6 fit"):
        adapter().send_dispatch(torch.zeros(7, 16), ids_TK)


def test_a_third_live_result_is_refused() -> None:
    config = case.make_config(1, dispatch_dtype="bfloat16", combine_dtype="bfloat16")
    heap, regions = case.make_heap(config)

    def run(transport: Transport) -> None:
        adapter = DeepEpLowLatency(StandIn(LowLatency(Group(transport), config, regions)), config)
        x_TH, ids_TK = torch.ones(1, 16).bfloat16(), torch.tensor([[0, 5, 9, -1]])
        first, _ = (adapter.dispatch(x_TH, ids_TK, TIMEOUT_MS) for _ in range(2))
        with pytest.raises(LiveResultError, match="combine the one of epoch 1 first"):
            adapter.send_dispatch(x_TH, ids_TK)
        adapter.combine(first.rows, first.handle, torch.ones(1, 4), TIMEOUT_MS)
        with pytest.raises(LiveResultError, match="epoch 1 was combined"):
            adapter.send_combine(first.rows, first.handle)

    run_loopback(heap, run)


def test_the_buffer_is_made_for_the_configuration_and_a_missing_deep_ep_is_named() -> None:
    made: dict[str, Any] = {}

    class Buffer:
        def __init__(self, group: Any, **arguments: Any) -> None:
            made.update(arguments)

        @staticmethod
        def get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
        ) -> int:
            assert (num_max_dispatch_tokens_per_rank, hidden, num_ranks) == (6, 16, 2)
            return 4096

    config = case.make_config(2)
    open_buffer(None, config, SimpleNamespace(Buffer=Buffer))
    assert made == {"num_rdma_bytes": 4096, "low_latency_mode": True, "num_qps_per_rank": 8}
    with pytest.raises(RuntimeError, match="DeepEP cannot be imported"):
        open_buffer(None, config)
