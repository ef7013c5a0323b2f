"""The checkpoint's multi-token-prediction module (DeepSeek-V3 report, section 2.2).

One decoder layer that guesses the token after next: from the hidden state h[j-1] of the main model
and the token t[j] that followed, it predicts t[j+1]. **Slot j of its cache layer holds the row of
(h[j-1], t[j])**, which depends on tokens up to j only: so hashing, sharing and copying of blocks
need no special rule. Slot 0 has no h[-1] and is masked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from whalepod.ep_comm.routed_experts import ExpertPlacement
from whalepod.kernels.interface import Kernels, Packed
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.deepseek_v3 import MAX_REPLAYED_TOKENS, DecoderLayer, DeepseekV3
from whalepod.models.mla import AttentionPlan, plan_attention
from whalepod.models.weights import Weights
from whalepod.mtp.draft_batch import DraftBatch


class MtpModule:
    """Shares the main model's embedding, head and rotary table, and its `kernels`, which may record
    what both do as one program.

    Its tensors are `model.layers.{num_layers}.*`, and its rows lie in the cache layer of that
    number, the one after the main model's.
    """

    def __init__(
        self,
        model: DeepseekV3,
        weights: Weights,
        kernels: Kernels,
        *,
        placement: ExpertPlacement | None = None,
    ) -> None:
        config = model.config
        hidden = config.hidden_size
        self._model = model
        self._kernels = kernels
        self._eps = config.rms_norm_eps
        self._cache_layer = config.num_layers
        prefix = f"model.layers.{self._cache_layer}"
        self._token_norm_H = weights.take(f"{prefix}.enorm.weight", (hidden,))
        self._hidden_norm_H = weights.take(f"{prefix}.hnorm.weight", (hidden,))
        name, shape = f"{prefix}.eh_proj", (hidden, 2 * hidden)

        @functools.cache
        def weight() -> Tensor:  # read once for both halves, and not at all where both are kept
            return weights.take(f"{name}.weight", shape)

        def pack_half(half: int) -> Packed:
            return kernels.pack_linear(weight()[:, half * hidden : (half + 1) * hidden])

        # of [embedding, hidden]: halves that are added need no copy of the two side by side
        self._token_projection, self._hidden_projection = (
            weights.packed(f"{name}.{half}", kernels, functools.partial(pack_half, half))
            for half in (0, 1)
        )
        self._layer = DecoderLayer(
            config, weights, self._cache_layer, kernels, model.cos_sin_SD, placement
        )
        self._head_norm_H = weights.take(f"{prefix}.shared_head.norm.weight", (hidden,))
        self._previous_TH = torch.empty(
            MAX_REPLAYED_TOKENS, hidden, dtype=model.dtype, device=model.device
        )

    def write_rows(
        self,
        token_ids_T: Tensor,
        previous_hidden_TH: Tensor,
        positions_T: Tensor,
        slots_T: Tensor,
        cache: LatentCache,
    ) -> None:
        """Store the rows of known tokens, without attention or experts (the KV-only pass).

        previous_hidden_TH [T, H]: the hidden state of the token before each token, of the main
        model (after its final norm).
        """

        def compute(previous_TH: Tensor) -> Tensor:
            x_TH, _ = self._input(token_ids_T, previous_TH)
            rows_PBC = cache.layer(self._cache_layer)
            self._layer.attention.store(x_TH, positions_T, slots_T, rows_PBC)
            return x_TH

        places = token_ids_T.data_ptr(), positions_T.data_ptr(), slots_T.data_ptr()
        key = ("rows", id(self), cache.rows_LPBC.data_ptr(), *places, len(token_ids_T))
        self._replay(key, previous_hidden_TH, compute)

    def forward(
        self, previous_hidden_TH: Tensor, batch: ForwardBatch, cache: LatentCache
    ) -> Tensor:
        """Run the whole layer and store the tokens' rows.

        Returns `[T, H]` after shared_head.norm: `DeepseekV3.logits` of it guess the token after
        each token, and it takes the place of the main model's hidden state for the next guess.
        """
        key = ("pass", id(self), cache.rows_LPBC.data_ptr(), *batch.places())
        return self._replay(
            key, previous_hidden_TH, lambda previous_TH: self._pass(previous_TH, batch, cache)
        )

    def end(
        self, previous_hidden_TH: Tensor, draft_batch: DraftBatch, cache: LatentCache
    ) -> Tensor:
        """Store the rows of all tokens of a draft batch, and run the layer for each text's newest.

        previous_hidden_TH [T, H] as in `write_rows`. Returns `[B, H]` as `forward` does.
        """
        key = ("end", id(self), id(draft_batch), cache.rows_LPBC.data_ptr())
        return self._replay(
            key, previous_hidden_TH, lambda previous_TH: self._end(previous_TH, draft_batch, cache)
        )

    def guess(
        self, previous_hidden_TH: Tensor, draft_batch: DraftBatch, cache: LatentCache
    ) -> None:
        """Do as `end`, then choose the token after each text and pass on, for all passes.

        Leaves the guesses in `guesses_by_pass`. One program: nothing comes back before the end.
        """

        def compute(previous_TH: Tensor) -> Tensor:
            hidden_BH = self._end(previous_TH, draft_batch, cache)
            for depth, drafts_B in enumerate(draft_batch.guesses_by_pass):
                if depth:
                    hidden_BH = self._pass(hidden_BH, draft_batch.ends[depth], cache)
                self._kernels.draw(
                    self._model.logits(hidden_BH),
                    draft_batch.temperatures_B,
                    draft_batch.seeds_B,
                    draft_batch.positions_by_pass[depth],
                    drafts_B,
                )
            return hidden_BH

        key = ("guess", id(self), id(draft_batch), cache.rows_LPBC.data_ptr())
        self._replay(key, previous_hidden_TH, compute)

    def _end(self, previous_TH: Tensor, draft_batch: DraftBatch, cache: LatentCache) -> Tensor:
        x_TH, residual_TH = self._input(draft_batch.token_ids_T, previous_TH)
        batch = draft_batch.ends[0]
        hidden_BH, _ = self._layer.ends(
            x_TH,
            residual_TH,
            self._head_norm_H,
            (draft_batch.positions_T, draft_batch.slots_T),
            draft_batch.last_B,
            batch.positions_T,
            self._plan(batch),
            cache.layer(self._cache_layer),
        )
        return hidden_BH

    def _pass(self, previous_TH: Tensor, batch: ForwardBatch, cache: LatentCache) -> Tensor:
        x_TH, residual_TH = self._input(batch.token_ids_T, previous_TH)
        hidden_TH, _ = self._layer(
            x_TH,
            residual_TH,
            self._head_norm_H,
            batch,
            self._plan(batch),
            cache.layer(self._cache_layer),
        )
        return hidden_TH

    def _plan(self, batch: ForwardBatch) -> AttentionPlan:
        plan = plan_attention(batch, batch.max_query_tokens)
        return replace(plan, first_key=1)

    def _replay(
        self,
        key: tuple[object, ...],
        previous_TH: Tensor,
        compute: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Compute, or replay what was captured: for few tokens, from hidden states at one place."""
        num_tokens = len(previous_TH)
        if not 0 < num_tokens <= MAX_REPLAYED_TOKENS:
            return compute(previous_TH)
        kept_TH = self._previous_TH[:num_tokens]
        kept_TH.copy_(previous_TH)
        return self._kernels.replay(key, self._model.dtype, lambda: compute(kept_TH))

    @property
    def expert_bytes(self) -> int:
        """Return the bytes of the routed experts that are loaded here."""
        return self._layer.expert_bytes

    def join(self) -> None:
        """Take part in a pass of other ranks that has no tokens of this one."""
        self._layer.join(self._model.embedding_VH[:0])

    def logits(self, hidden_BH: Tensor) -> Tensor:
        """Return f32 logits `[B, V]` of what `forward` returned, by the main model's head."""
        return self._model.logits(hidden_BH)

    def _input(self, token_ids_T: Tensor, previous_hidden_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Return (normalised input of the layer, residual); embedding first, then hidden."""
        norm = self._kernels.rms_norm
        embedded_TH = self._kernels.embed(token_ids_T, self._model.embedding_VH)
        tokens_TH = norm(embedded_TH, self._token_norm_H, self._eps)
        hidden_TH = norm(previous_hidden_TH, self._hidden_norm_H, self._eps)
        return self._kernels.add_rms_norm(
            self._kernels.linear(tokens_TH, self._token_projection),
            self._kernels.linear(hidden_TH, self._hidden_projection),
            self._layer.input_norm_H,
            self._eps,
        )
