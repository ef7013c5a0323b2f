"""`CpuKernels`: the parts of the interface put together, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from whalepod.kernels.cpu import (
    attention,
    captured_graphs,
    elementwise,
    experts,
    int8_packing,
    linear,
    noise,
    packed,
    prefill_attention,
    router,
)
from whalepod.kernels.cpu.int8_tiles import MIN_ROWS as MIN_INT8_TILE_ROWS
from whalepod.kernels.cpu.packed import PackedExperts, PackedLinear
from whalepod.kernels.cpu.thread_pool import ThreadPool
from whalepod.kernels.cpu.tiles import can_use_tiles
from whalepod.kernels.cpu.workspace import Workspace

MIN_TILE_ROWS = 4
"""AMX wins over AVX512-BF16 from this many rows, where a machine has both."""
NEVER = 1 << 62

_MODEL_KERNELS = (
    linear.LINEAR,
    router.GATE,
    captured_graphs.REPLAY,
    *elementwise.KERNELS,
    experts.EXPERTS,
    attention.ATTENTION,
)
_INT8_KERNELS = (int8_packing.PACK_INT8, linear.LINEAR_INT8, experts.EXPERTS_INT8)
"""Compiled for the model dtype, like those above."""
_F32_KERNELS = (noise.GUMBEL_NOISE, noise.DRAW, packed.PACK)
"""Compiled for f32 whatever the model dtype."""


class CpuKernels:
    """`Kernels` on a CPU. See `whalepod.kernels.interface` for every contract.

    is_invariant  a row's bits depend on the row alone, whatever the batch, the chunks, the threads
    is_int8       weights of int8: projections, experts, heads of attention and the head. Rows are
                  quantised on the way; a row's bits never depend on other rows. Embeddings, norms,
                  the router and sensitive projections keep their dtype.
    code_folder   keeps compiled code for the next process; None: where numba would
    """

    def __init__(
        self,
        *,
        num_threads: int | None = None,
        is_invariant: bool = False,
        is_int8: bool = False,
        code_folder: Path | None = None,
    ) -> None:
        self.name = ", ".join(["cpu", *["batch-invariant"] * is_invariant, *["int8"] * is_int8])
        self._has_tiles, self._is_int8 = can_use_tiles(), is_int8
        self._pool = ThreadPool(num_threads or torch.get_num_threads(), code_folder)
        work = Workspace(self._pool)
        tile_rows = NEVER
        if self._has_tiles and is_int8:
            tile_rows = 1  # exact weights, too, give a row the same bits beside any others
        elif self._has_tiles and not is_invariant:  # tiles add in another order than vectors
            tile_rows = MIN_TILE_ROWS
        self._exact = packed.ExactWeights(work, tile_rows)
        self._weights: packed.WeightFormat = self._exact
        if is_int8:
            min_rows = MIN_INT8_TILE_ROWS if self._has_tiles else NEVER
            self._weights = int8_packing.Int8Weights(work, min_rows)
        self.packed_layout: str | None = self._weights.layout
        self.replay, self.eager = work.replay, work.eager

        rows = elementwise.ElementwiseOperations(work)
        self.embed, self.rope, self.write_latent = rows.embed, rows.rope, rows.write_latent
        self.rms_norm, self.add_rms_norm = rows.rms_norm, rows.add_rms_norm

        products = linear.LinearOperations(work, self._weights, self._exact)
        self.pack_linear, self.linear = products.pack_linear, products.linear
        self.linear_f32, self.batched_linear = products.linear_f32, products.batched_linear
        self.pack_batched_linear = products.pack_batched_linear

        mlps = experts.ExpertOperations(work, self._weights)
        self.pack_experts, self.experts = mlps.pack_experts, mlps.experts
        self.expert_rows = mlps.expert_rows
        self.pack_gated_mlp, self.gated_mlp = mlps.pack_gated_mlp, mlps.gated_mlp

        routing = router.RouterOperations(work, self._exact)
        self.gate, self.pack_router, self.route = routing.gate, routing.pack_router, routing.route

        absorbed = attention.AttentionOperations(work, rows, products, self._has_tiles)
        self.absorb_queries = absorbed.absorb_queries
        self.mla_attention = absorbed.mla_attention
        expanded = prefill_attention.PrefillOperations(work, self._has_tiles, is_invariant)
        self.mla_prefill = expanded.mla_prefill

        sampling = noise.SamplingOperations(work)
        self.gumbel_noise, self.draw = sampling.gumbel_noise, sampling.draw

    def warm_up(self, dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
        """Compile all kernels for a model dtype; `progress(done, all)` is called along the way."""
        kernels = [(kernel, dtype) for kernel in _MODEL_KERNELS]
        if self._is_int8:
            kernels += [(kernel, dtype) for kernel in _INT8_KERNELS]
        if self._has_tiles and dtype == torch.bfloat16:
            kernels.append((prefill_attention.PREFILL_ATTENTION, dtype))
        kernels += [(kernel, torch.float32) for kernel in _F32_KERNELS]
        self._pool.compile(list(dict.fromkeys(kernels)), progress)

    def packed_parts(
        self, packed: PackedLinear | PackedExperts
    ) -> tuple[list[Tensor], list[list[int]]]:
        parts = [packed] if isinstance(packed, PackedLinear) else [packed.gate_up, packed.down]
        return [p.tensor for p in parts], [[p.num_columns, p.length] for p in parts]

    def unpack(self, tensors: list[Tensor], sizes: list[list[int]]) -> PackedLinear | PackedExperts:
        parts = [
            PackedLinear(t, n, k, self._weights if t.dtype == torch.uint8 else self._exact)
            for t, (n, k) in zip(tensors, sizes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else PackedExperts(*parts)
