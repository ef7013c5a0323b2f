"""The contract of every tensor operation: shapes, dtypes, layouts, units, sources.

Suffix letters name the axes: T tokens of a step, H hidden, N heads, D head dimension, R latent
(`kv_lora_rank`), C cache row (R + rope dimension), E routed experts, K experts per token,
I intermediate, V vocabulary, B requests, S tokens in the cache, P physical blocks.
"Model dtype" is the dtype of the weights and activations of the loaded model (f32 or bf16).
Any T, B or K may be 0. Inputs are contiguous unless a docstring says otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:  # sizes of a model can be read without loading torch
    from collections.abc import Callable, Hashable

    import torch
    from torch import Tensor

BLOCK_TOKENS = 64
"""Tokens in one block of the latent cache, and the tile along the keys of attention."""

Packed: TypeAlias = Any
"""A weight in the layout that one backend wants. Only the backend that packed it reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """How a router turns logits into experts and weights (DeepSeek-V2 and -V3 reports)."""

    num_experts: int
    num_experts_per_token: int
    num_groups: int = 1
    num_selected_groups: int = 1
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    normalize_weights: bool = True
    scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"num_experts ({self.num_experts}) must be a multiple of "
                f"num_groups ({self.num_groups})"
            )
        if not 1 <= self.num_selected_groups <= self.num_groups:
            raise ValueError(
                f"num_selected_groups ({self.num_selected_groups}) must be in "
                f"1..num_groups ({self.num_groups})"
            )
        selectable = self.num_selected_groups * (self.num_experts // self.num_groups)
        if not 1 <= self.num_experts_per_token <= selectable:
            raise ValueError(
                f"num_experts_per_token ({self.num_experts_per_token}) must be in 1..{selectable}, "
                f"the experts of the {self.num_selected_groups} selected groups"
            )


class Kernels(Protocol):
    """Every operation that the models and the sampler use, on one device."""

    name: str
    """Shown to users: "reference", "cpu", "triton", ..."""
    packed_layout: str | None
    """Names the layout of packed weights, for files of them; None: they are kept as they were."""

    def replay(self, key: Hashable, dtype: torch.dtype, compute: Callable[[], Tensor]) -> Tensor:
        """Return `compute()`, or do the same again without calling it.

        A backend may capture the operations of a key and replay them: equal keys promise equal
        shapes, strides and addresses of all that `compute` reads, and that it calls nothing but
        operations of this interface and makes views. `dtype` is the model's. The result is the
        caller's own.
        """
        ...

    def eager(self, compute: Callable[[], Tensor], like: Tensor) -> Tensor:
        """Return `compute()`, of the shape and dtype of `like`: work between two operations that is
        none of this interface.

        Inside `replay`, `compute` is called each time: what it reads stays at its place, and holds
        the values of that time. It does not call `replay`.
        """
        ...

    # -- dense ---------------------------------------------------------------------------------

    def embed(self, token_ids_T: Tensor, embedding_VH: Tensor) -> Tensor:
        """Return the rows of int64 ids, `[T, H]`."""
        ...

    def pack_linear(self, weight_NK: Tensor, is_sensitive: bool = False) -> Packed:
        """Prepare a weight `[N, K]` for `linear` and `linear_f32`; it may stay as it is.

        Of the model dtype. A backend that rounds weights keeps those of `is_sensitive` exact: small
        ones, from whose errors all that follows suffers.
        """
        ...

    def linear(self, x_TK: Tensor, weight: Packed) -> Tensor:
        """Return x W^T, `[T, N]` in the dtype of `x_TK`, accumulated in f32."""
        ...

    def linear_f32(self, x_TK: Tensor, weight: Packed) -> Tensor:
        """Return x W^T as f32 `[T, N]`: the output head and the router need unrounded sums.

        `x_TK` has the dtype of the weight.
        """
        ...

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        """Scale each row to unit root-mean-square (mean in f32), then by the weight. `[T, H]`."""
        ...

    def add_rms_norm(
        self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(residual + x), residual + x); the sum is rounded to the model dtype."""
        ...

    def pack_gated_mlp(self, gate_up_JH: Tensor, down_HI: Tensor) -> Packed:
        """Prepare `[2 I, H]` (gate rows, then up rows) and `[H, I]` for `gated_mlp`."""
        ...

    def gated_mlp(self, x_TH: Tensor, packed: Packed, add_to_TH: Tensor | None = None) -> Tensor:
        """Return down(silu(gate(x)) * up(x)), `[T, H]` model dtype, added to `add_to_TH` if given.

        silu(gate) * up is rounded to the model dtype; a backend may keep gate and up in f32 before.
        """
        ...

    def packed_parts(self, packed: Packed) -> tuple[list[Tensor], list[list[int]]]:
        """Return the contiguous tensors of a packed weight, and what else `unpack` needs."""
        ...

    def unpack(self, tensors: list[Tensor], sizes: list[list[int]]) -> Packed:
        """Put together again what `packed_parts` took apart, perhaps in another process."""
        ...

    # -- attention -----------------------------------------------------------------------------

    def rope(self, x_TND: Tensor, positions_T: Tensor, cos_sin_SD: Tensor) -> Tensor:
        """Rotate interleaved pairs (x[2i], x[2i+1]) by the angle of each token's position.

        x_TND       [T, N, D]  model dtype; may be a strided view
        positions_T [T]        int64
        cos_sin_SD  [S, D]     f32; row s holds D/2 cosines, then D/2 sines, YaRN's factors included
        returns     [T, N, D]  model dtype, pairs still interleaved (the checkpoint's layout)
        """
        ...

    def absorb_queries(
        self, q_TND: Tensor, w_uk: Packed, positions_T: Tensor, cos_sin_SD: Tensor
    ) -> Tensor:
        """Return the queries of `mla_attention`, `[T, N, C]`: `batched_linear` of the nope part,
        then `rope` of the rest.

        q_TND [T, N, nope + rope] may be a strided view; `w_uk` comes from `pack_batched_linear`.
        """
        ...

    def write_latent(
        self,
        kv_TC: Tensor,
        norm_weight_R: Tensor,
        eps: float,
        positions_T: Tensor,
        cos_sin_SD: Tensor,
        slots_T: Tensor,
        cache_PBC: Tensor,
    ) -> None:
        """Normalise the latent part, rotate the key part, and store one cache row per token.

        kv_TC      [T, C]      output of kv_a_proj_with_mqa: R latent values, then the rope key
        slots_T    [T]         int64, block * BLOCK_TOKENS + offset
        cache_PBC  [P, 64, C]  model dtype, one layer's rows; written in place
        """
        ...

    def mla_attention(
        self,
        q_TNC: Tensor,
        cache_PBC: Tensor,
        query_start_B1: Tensor,
        context_lens_B: Tensor,
        block_tables_BM: Tensor,
        softmax_scale: float,
        latent_rank: int,
        first_key: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Attend with absorbed queries over the paged latent cache.

        q_TNC           [T, N, C]  model dtype: R absorbed values, then the rotated rope query
        cache_PBC       [P, 64, C] model dtype; unused rows may hold NaN
        query_start_B1  [B + 1]    int32; request b owns tokens start[b] .. start[b+1]
        context_lens_B  [B]        int32; tokens in the cache, this step's included (0: no keys)
        block_tables_BM [B, M]     int32; entries at or past ceil(context / 64) may be garbage
        latent_rank     R: the values are the first R columns of a row
        first_key       keys before it are masked, whatever their rows hold (MTP's slot 0)
        returns         o [T, N, R] model dtype and lse [T, N] f32, natural logarithm

        Causal and right-aligned: query j of request b sees keys up to context - num_queries + j.
        A query without keys gives o = 0, lse = -inf. (FlashMLA's dense decode contract, with the
        latent rank free and -inf instead of its +inf.)
        """
        ...

    def mla_prefill(
        self, q_TND: Tensor, k_SND: Tensor, v_SNE: Tensor, softmax_scale: float
    ) -> Tensor:
        """Attend with expanded keys and values for one request; causal, right-aligned.

        q_TND [T, N, D], k_SND [S, N, D], v_SNE [S, N, E] with S >= T >= 1 -> [T, N, E] model dtype
        """
        ...

    def pack_batched_linear(self, weight_NAB: Tensor) -> Packed:
        """Prepare a weight per head `[N, A, B]` for `batched_linear`; it may stay as it is."""
        ...

    def batched_linear(self, x_TNA: Tensor, weight: Packed) -> Tensor:
        """Return einsum("tna,nab->tnb"), model dtype: the absorbed key and value projections.

        `x_TNA` may be a strided view (the nope part of the queries).
        """
        ...

    # -- mixture of experts --------------------------------------------------------------------

    def gate(
        self, logits_TE: Tensor, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        """Select experts: ids int64 `[T, K]` and weights f32 `[T, K]`, best score first.

        logits_TE f32; bias_E f32 (noaux_tc, for the choice only) or None. Experts outside the
        selected groups are masked with -inf; the lowest id wins ties; weights are the unbiased
        scores, divided by their sum + 1e-20 if `normalize_weights`, times `scaling_factor`.
        Source: DeepSeek-V3 report, section 2.1.2.
        """
        ...

    def pack_router(self, weight_EH: Tensor) -> Packed:
        """Prepare the f32 weight of a router for `route`."""
        ...

    def route(
        self, x_TH: Tensor, router: Packed, bias_E: Tensor | None, config: GateConfig
    ) -> tuple[Tensor, Tensor]:
        """Return `gate` of the router's logits: `x_TH` (model dtype) in f32 times its weight."""
        ...

    def pack_experts(self, gate_up_EJH: Tensor, down_EHI: Tensor) -> Packed:
        """Prepare `[E, 2 I, H]` (gate rows, then up rows) and `[E, H, I]` for `experts`."""
        ...

    def experts(self, x_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor, packed: Packed) -> Tensor:
        """Return sum_k weights[t, k] * expert[ids[t, k]](x[t]), `[T, H]` model dtype.

        ids are local to `packed`; -1 is no selection and adds nothing. The sum runs in k order in
        f32 and is rounded once.
        """
        ...

    def expert_rows(self, x_SH: Tensor, ids_S: Tensor, packed: Packed) -> Tensor:
        """Return expert[ids[s]](x[s]) as f32 `[S, H]`, not rounded to the model dtype.

        ids_S [S] int64, local to `packed`. Summed in k order with their weights, these are what
        `experts` sums: so a token's experts may live on several ranks.
        """
        ...

    # -- sampling ------------------------------------------------------------------------------

    def gumbel_noise(self, seeds_B: Tensor, positions_B: Tensor, num_tokens: int) -> Tensor:
        """Return g(seed, position, token) = -log(-log(u)), f32 `[B, num_tokens]`.

        seeds_B int64, positions_B int64. `u` in (0, 1) comes from a counter-based hash of the three
        integers (splitmix64), so the noise of a token depends on nothing else: not on neighbours,
        drafts or layout. Bit-equal on every backend.
        """
        ...

    def draw(
        self,
        logits_BV: Tensor,
        temperatures_B: Tensor,
        seeds_B: Tensor,
        positions_B: Tensor,
        out_B: Tensor,
    ) -> None:
        """Set out[b] = argmax(logits[b] / temperature + g(seed, position)), the first if some tie.

        logits_BV f32; temperatures_B f32: 0 stands for no noise, argmax(logits[b]); seeds_B,
        positions_B int64 as in `gumbel_noise`; out_B int64. For guesses: NaN is not looked for.
        """
        ...
