"""`CpuKernels`: the parts of the interface put together, and what is compiled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from whalepod.kernels.cpu import attention, captured_graphs, elementwise, experts, linear, noise
from whalepod.kernels.cpu.abi import with_operands
from whalepod.kernels.cpu.packed import ExactWeights, PackedExperts, PackedLinear, WeightFormat
from whalepod.kernels.cpu.router import GATE, RouterOperations
from whalepod.kernels.cpu.simd import target_has
from whalepod.kernels.cpu.thread_pool import ThreadPool
from whalepod.kernels.cpu.workspace import Workspace


def can_use_tiles() -> bool:
    """Ask the system for the matrix tiles of AMX; return whether this process may use them."""
    return target_has("amx-bf16") and target_has("amx-tile") and bool(torch.cpu._init_amx())


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
        self._has_tiles = can_use_tiles()
        self._pool = ThreadPool(num_threads or torch.get_num_threads(), code_folder)
        work = Workspace(self._pool)
        self._exact = _exact_weights(work, self._has_tiles, is_invariant, is_int8)
        self._weights = _int8_weights(work, self._has_tiles) if is_int8 else self._exact
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

        routing = RouterOperations(work, self._exact)
        self.gate, self.pack_router, self.route = routing.gate, routing.pack_router, routing.route

        choose_reader, expanded = (
            attention.read_by_vectors,
            attention.PrefillOperations(is_invariant),
        )
        if self._has_tiles:
            from whalepod.kernels.cpu.amx.attention import TilePrefill, read_by_tiles

            choose_reader, expanded = read_by_tiles, TilePrefill(work, is_invariant)
        absorbed = attention.AttentionOperations(work, rows, products, choose_reader)
        self.absorb_queries = absorbed.absorb_queries
        self.mla_attention = absorbed.mla_attention
        self.mla_prefill = expanded.mla_prefill

        sampling = noise.SamplingOperations(work)
        self.gumbel_noise, self.draw = sampling.gumbel_noise, sampling.draw

    def warm_up(self, dtype: torch.dtype, progress: Callable[[int, int], None]) -> None:
        """Compile all kernels for a model dtype; `progress(done, all)` is called along the way."""
        formats = {self._exact, self._weights}
        model_kernels = [
            GATE, captured_graphs.REPLAY, *elementwise.KERNELS, attention.ATTENTION,
            *(with_operands(linear.LINEAR, format_.operands(dtype)) for format_ in formats),
            with_operands(experts.EXPERTS, self._weights.operands(dtype)),
        ]  # fmt: skip
        if self._has_tiles and dtype == torch.bfloat16:
            from whalepod.kernels.cpu.amx.attention import KERNELS

            model_kernels += KERNELS
        kernels = [(kernel, dtype) for kernel in model_kernels]
        kernels += [(f.pack_kernel, f.pack_dtype or dtype) for f in formats]
        kernels += [(kernel, torch.float32) for kernel in (noise.GUMBEL_NOISE, noise.DRAW)]
        self._pool.compile(kernels, progress)

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


def _exact_weights(
    work: Workspace, has_tiles: bool, is_invariant: bool, is_int8: bool
) -> WeightFormat:
    if not has_tiles or (is_invariant and not is_int8):  # tiles add in another order than vectors
        return ExactWeights(work)
    from whalepod.kernels.cpu.amx.tiles import MIN_ROWS, TileWeights

    # beside int8 exact weights, too, give a row the same bits beside any others
    return TileWeights(work, 1 if is_int8 else MIN_ROWS)


def _int8_weights(work: Workspace, has_tiles: bool) -> WeightFormat:
    if has_tiles and target_has("amx-int8"):
        from whalepod.kernels.cpu.amx.int8 import TileInt8Weights

        return TileInt8Weights(work)
    from whalepod.kernels.cpu.int8_packing import Int8Weights

    return Int8Weights(work)
