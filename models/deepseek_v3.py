"""The DeepSeek-V3 model, top to bottom: tokens in, hidden states and logits out.

DeepSeek-V2 is the same model with another router; only the configuration tells them apart.
"""

from __future__ import annotations

from torch import Tensor

from whalepod.ep_comm.routed_experts import ExpertPlacement
from whalepod.kernels.interface import Kernels
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.config import ModelConfig
from whalepod.models.mla import AttentionPlan, LatentAttention, plan_attention
from whalepod.models.moe import GatedMlp, MixtureOfExperts
from whalepod.models.rope import build_rope_table
from whalepod.models.weights import Weights

MAX_REPLAYED_TOKENS = 64
"""Steps of up to this many tokens are captured and replayed: decode, not prefill."""


class DeepseekV3:
    """A loaded model. It owns its weights, not the cache.

    max_positions                longest sequence that the rotary table covers
    absorbed_max_query_tokens    requests with more queries in a step use expanded attention
    placement                    which routed experts to load, and what computes the others;
                                 None: all are here
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        kernels: Kernels,
        *,
        max_positions: int,
        absorbed_max_query_tokens: int,
        placement: ExpertPlacement | None = None,
    ) -> None:
        self.config = config
        self._kernels = kernels
        self._absorbed_max_query_tokens = absorbed_max_query_tokens
        embedding_shape = (config.vocab_size, config.hidden_size)
        self.embedding_VH = weights.take("model.embed_tokens.weight", embedding_shape)
        self.dtype, self.device = self.embedding_VH.dtype, self.embedding_VH.device
        table_SD = build_rope_table(config.rope, config.qk_rope_head_dim, max_positions)
        self.cos_sin_SD = table_SD.to(self.device)
        self._layers = [
            DecoderLayer(config, weights, index, kernels, self.cos_sin_SD, placement)
            for index in range(config.num_layers)
        ]
        self._norm_H = weights.take("model.norm.weight", (config.hidden_size,))
        head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
        self._head = weights.packed(
            "head",
            kernels,
            lambda: kernels.pack_linear(weights.take(f"{head}.weight", embedding_shape)),
        )
        weights.finish()

    def forward(self, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        """Run the tokens of a step and store their cache rows.

        Returns the hidden states of all tokens after the final norm, `[T, H]` model dtype: what
        `logits` and the multi-token-prediction module take.
        """
        # without expanded attention nothing but `Kernels` sees a tensor, or it is called outside
        is_plain = batch.max_query_tokens <= self._absorbed_max_query_tokens
        if not (is_plain and batch.num_tokens <= MAX_REPLAYED_TOKENS):
            return self._compute(batch, cache)
        key = (id(self), cache.rows_LPBC.data_ptr(), *batch.places())
        return self._kernels.replay(key, self.dtype, lambda: self._compute(batch, cache))

    def _compute(self, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        plan = plan_attention(batch, self._absorbed_max_query_tokens)
        residual_TH = self._kernels.embed(batch.token_ids_T, self.embedding_VH)
        x_TH = self._kernels.rms_norm(
            residual_TH, self._layers[0].input_norm_H, self.config.rms_norm_eps
        )
        next_norms = [*(layer.input_norm_H for layer in self._layers[1:]), self._norm_H]
        for index, layer in enumerate(self._layers):
            x_TH, residual_TH = layer(
                x_TH, residual_TH, next_norms[index], batch, plan, cache.layer(index)
            )
        return x_TH

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the routed experts that are loaded here."""
        return sum(layer.expert_bytes for layer in self._layers)

    def join(self) -> None:
        """Take part in a step of other ranks that has no tokens of this one.

        The same dispatches and combines as `forward`, with T = 0.
        """
        x_0H = self.embedding_VH[:0]
        for layer in self._layers:
            layer.join(x_0H)

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Return f32 logits `[B, V]` of hidden states that `forward` returned."""
        return self._kernels.linear_f32(hidden_BH, self._head)


class DecoderLayer:
    """Attention, then a dense MLP or a mixture of experts, each on a normalised residual."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        index: int,
        kernels: Kernels,
        cos_sin_SD: Tensor,
        placement: ExpertPlacement | None,
    ) -> None:
        prefix = f"model.layers.{index}"
        hidden = config.hidden_size
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self.input_norm_H = weights.take(f"{prefix}.input_layernorm.weight", (hidden,))
        self.attention = LatentAttention(
            config, weights, f"{prefix}.self_attn", kernels, cos_sin_SD
        )
        self._post_attention_norm_H = weights.take(
            f"{prefix}.post_attention_layernorm.weight", (hidden,)
        )
        self._mlp: GatedMlp | MixtureOfExperts
        if config.gate is not None and config.is_moe_layer(index):
            self._mlp = MixtureOfExperts(
                config, config.gate, weights, f"{prefix}.mlp", kernels, placement
            )
        else:
            self._mlp = GatedMlp(
                hidden, config.intermediate_size, weights, f"{prefix}.mlp", kernels
            )

    def __call__(
        self,
        x_TH: Tensor,
        residual_TH: Tensor,
        next_norm_H: Tensor,
        batch: ForwardBatch,
        plan: AttentionPlan,
        cache_PBC: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (input of the next layer, residual): `x_TH` is normalised, the residual is not.

        The norm that follows the layer is fused with the layer's last addition.
        """
        x_TH = self.attention(x_TH, batch, plan, cache_PBC)
        return self._finish(x_TH, residual_TH, next_norm_H)

    def ends(
        self,
        x_TH: Tensor,
        residual_TH: Tensor,
        next_norm_H: Tensor,
        stored: tuple[Tensor, Tensor],
        rows_B: Tensor,
        positions_B: Tensor,
        plan: AttentionPlan,
        cache_PBC: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Store the rows of all tokens, and go on with those in `rows_B` only.

        stored  positions and slots of all tokens; `positions_B` and `plan` are those that go on.
        """
        projected = self.attention.store(x_TH, *stored, cache_PBC)
        if len(rows_B) < len(x_TH):
            projected = self._kernels.embed(rows_B, projected)
            residual_TH = self._kernels.embed(rows_B, residual_TH)
        x_BH = self.attention.attend(projected, positions_B, plan, cache_PBC)
        return self._finish(x_BH, residual_TH, next_norm_H)

    def _finish(
        self, x_TH: Tensor, residual_TH: Tensor, next_norm_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        add_norm = self._kernels.add_rms_norm
        x_TH, residual_TH = add_norm(x_TH, residual_TH, self._post_attention_norm_H, self._eps)
        x_TH = self._mlp(x_TH)
        return add_norm(x_TH, residual_TH, next_norm_H, self._eps)

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of this layer's routed experts that are loaded here."""
        return self._mlp.expert_bytes if isinstance(self._mlp, MixtureOfExperts) else 0

    def join(self, x_0H: Tensor) -> None:
        """Take part in the experts' work for other ranks."""
        if isinstance(self._mlp, MixtureOfExperts):
            self._mlp.join(x_0H)
