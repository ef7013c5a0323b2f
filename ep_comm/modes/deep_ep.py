"""The low-latency mode of an installed DeepEP, with the methods and results of our own.

DeepEP (https://github.com/deepseek-ai/DeepEP) runs on GPUs only. Its order of rows is not fixed:
two runs give the same rows of an expert in another order, and `source_info` says which is which. It
has no deadline that ends a call with a status, so every status is complete.

Suffix letters as in `whalepod.ep_comm.layout`, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from whalepod.ep_comm.group import CallStatus
from whalepod.ep_comm.modes.low_latency import LiveResultError
from whalepod.ep_comm.modes.low_latency_config import NUM_SETS, LowLatencyConfig
from whalepod.ep_comm.modes.low_latency_output import Dispatched, Handle, ReceivedRows


def open_buffer(process_group: Any, config: LowLatencyConfig, deep_ep: Any = None) -> Any:
    """Make DeepEP's buffer for this configuration; RuntimeError if DeepEP is not installed."""
    if deep_ep is None:
        try:
            deep_ep = import_module("deep_ep")
        except ImportError as error:
            raise RuntimeError(
                f"DeepEP cannot be imported ({error}): install it, or choose another mode"
            ) from error
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        config.max_tokens, config.hidden, config.num_ranks, config.num_experts
    )
    return deep_ep.Buffer(
        process_group,
        num_rdma_bytes=num_bytes,
        low_latency_mode=True,
        num_qps_per_rank=config.num_local,
    )


@dataclass(frozen=True, slots=True)
class DeepEpDispatch:
    """Rows are on their way."""

    _finish: Callable[[], Dispatched]

    def receive(self, timeout_ms: float) -> Dispatched:
        """Run DeepEP's receive hook. `timeout_ms` is for DeepEP to keep: it has its own."""
        return self._finish()


@dataclass(frozen=True, slots=True)
class DeepEpCombine:
    """The experts' rows are on their way back; DeepEP takes the weights when it sends."""

    _finish: Callable[[Tensor], tuple[Tensor, CallStatus]]

    def receive(self, weights_TK: Tensor, timeout_ms: float) -> tuple[Tensor, CallStatus]:
        return self._finish(weights_TK)


class DeepEpLowLatency:
    """One rank's end; `buffer` is `deep_ep.Buffer` in low-latency mode (`open_buffer`)."""

    def __init__(self, buffer: Any, config: LowLatencyConfig) -> None:
        if config.output != "per_expert" or config.pre_reduce:
            raise ValueError(
                f"DeepEP gives rows per expert and applies weights at combine; got output "
                f"{config.output}, pre_reduce {config.pre_reduce}"
            )
        if "float32" in (config.dispatch_dtype, config.combine_dtype):
            raise ValueError("DeepEP sends bfloat16 or float8 rows and returns bfloat16")
        if config.dispatch_dtype == "float8" and not config.column_major:
            raise ValueError("DeepEP's fp8 scales are column-major: set column_major")
        self.config = config
        self._buffer = buffer
        self._epoch = 0
        self._live: dict[int, Any] = {}

    def dispatch(self, x_TH: Tensor, ids_TK: Tensor, timeout_ms: float) -> Dispatched:
        """Send and receive in one go."""
        return self.send_dispatch(x_TH, ids_TK).receive(timeout_ms)

    def send_dispatch(self, x_TH: Tensor, ids_TK: Tensor) -> DeepEpDispatch:
        """Begin to send each token to its experts; see `LowLatency.send_dispatch`."""
        config = self.config
        if len(x_TH) > config.max_tokens:
            raise ValueError(
                f"{len(x_TH)} tokens in one low-latency dispatch, at most {config.max_tokens} fit"
            )
        if len(self._live) >= NUM_SETS:
            raise LiveResultError(
                f"dispatch {self._epoch + 1} would be a third live result: combine the one of "
                f"epoch {min(self._live)} first"
            )
        received, count_E, deep_handle, _, hook = self._buffer.low_latency_dispatch(
            x_TH,
            ids_TK,
            config.max_tokens,
            config.num_experts,
            use_fp8=config.dispatch_dtype == "float8",
            round_scale=config.round_scale,
            use_ue8m0=config.ue8m0,
            async_finish=False,
            return_recv_hook=True,
        )
        self._epoch += 1
        epoch = self._epoch
        self._live[epoch] = deep_handle

        def finish() -> Dispatched:
            hook()
            return self._result(epoch, received, count_E, deep_handle, ids_TK, x_TH.dtype)

        return DeepEpDispatch(finish)

    def combine(
        self, y: Tensor, handle: Handle, weights_TK: Tensor, timeout_ms: float
    ) -> tuple[Tensor, CallStatus]:
        """Send and receive in one go."""
        return self.send_combine(y, handle).receive(weights_TK, timeout_ms)

    def send_combine(self, y: Tensor, handle: Handle) -> DeepEpCombine:
        """Prepare to send the experts' rows back, laid out as the dispatched ones."""
        if handle.epoch not in self._live:
            raise LiveResultError(f"the result of epoch {handle.epoch} was combined or given up")

        def finish(weights_TK: Tensor) -> tuple[Tensor, CallStatus]:
            y_TH, _, hook = self._buffer.low_latency_combine(
                y,
                handle.ids_TK,
                weights_TK,
                self._live.pop(handle.epoch),
                use_logfmt=False,
                zero_copy=False,
                async_finish=False,
                return_recv_hook=True,
            )
            hook()
            return y_TH, CallStatus(operation="DeepEP combine", epoch=handle.epoch)

        return DeepEpCombine(finish)

    def _result(
        self,
        epoch: int,
        received: Tensor | tuple[Tensor, Tensor],
        count_E: Tensor,
        deep_handle: Any,
        ids_TK: Tensor,
        dtype: torch.dtype,
    ) -> Dispatched:
        rows, scales = received if isinstance(received, tuple) else (received, None)
        source_info, ranges_ER = deep_handle[:2]
        nothing = torch.empty(0, 0, device=ids_TK.device)
        received_rows = ReceivedRows(
            counts={},
            row_of_NK=nothing.long(),
            weights_NK=nothing,
            count_E=count_E,
            first_row_E=torch.arange(len(count_E), device=ids_TK.device) * rows.shape[1],
            expert_S=None,
            ranges_ER=ranges_ER,
        )
        return Dispatched(
            rows=rows,
            scales=scales,
            count_E=count_E,
            first_row_E=received_rows.first_row_E,
            source_info=source_info,
            expert_S=None,
            ranges_ER=ranges_ER,
            status=CallStatus(operation="DeepEP dispatch", epoch=epoch),
            handle=Handle(epoch=epoch, ids_TK=ids_TK, dtype=dtype, received=received_rows),
        )
