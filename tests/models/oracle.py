"""transformers' models as the oracle, and a driver that runs ours as an engine would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedModel,
)

from whalepod.kernels.interface import BLOCK_TOKENS, Kernels, Packed
from whalepod.models.batch import ForwardBatch
from whalepod.models.cache import LatentCache
from whalepod.models.config import parse_config
from whalepod.models.deepseek_v3 import DeepseekV3

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 256,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

V2 = {"norm_topk_prob": False, "topk_method": "group_limited_greedy", "n_shared_experts": 2}


def make_oracle(seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a random transformers model of `TINY` with `changes`; `model_type` chooses the family.

    Weights are scaled so that logits spread and routers decide, instead of transformers' 0.02.
    """
    settings = TINY | changes
    model_type = settings.pop("model_type", "deepseek_v3")
    torch.manual_seed(seed)
    if model_type == "deepseek_v2":
        config = DeepseekV2Config(**settings, attn_implementation="eager")
        oracle = DeepseekV2ForCausalLM(config)
    else:
        config = DeepseekV3Config(**settings, attn_implementation="eager")
        oracle = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, tensor in oracle.state_dict().items():
            _randomise(name, tensor)
    return oracle.eval()


def _randomise(name: str, tensor: Tensor) -> None:
    if name.endswith("e_score_correction_bias"):
        tensor.normal_(0.0, 0.1)
    elif tensor.dim() == 1:
        tensor.normal_(1.0, 0.1)
    elif name.endswith("embed_tokens.weight"):
        tensor.normal_()
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5)


class OracleWeights:
    """The tensors of a transformers model under the names of a checkpoint."""

    def __init__(self, oracle: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
        self.bytes_read = 0
        self._dtype = dtype
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in oracle.state_dict().items():
            self._add(name, tensor)
        if oracle.config.tie_word_embeddings:
            del self._tensors["lm_head.weight"]
        self._left = set(self._tensors)

    def _add(self, name: str, tensor: Tensor) -> None:
        if name.endswith("experts.gate_up_proj"):
            for expert, gate_up in enumerate(tensor):
                prefix = f"{name.removesuffix('.gate_up_proj')}.{expert}"
                gate, up = gate_up.chunk(2)
                self._tensors[f"{prefix}.gate_proj.weight"] = gate
                self._tensors[f"{prefix}.up_proj.weight"] = up
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(tensor):
                self._tensors[f"{name.removesuffix('.down_proj')}.{expert}.down_proj.weight"] = down
        else:
            self._tensors[name] = tensor

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        tensor = self._tensors[name]
        assert tuple(tensor.shape) == shape, (name, tensor.shape, shape)
        self._left.discard(name)
        return tensor.detach().to(dtype or self._dtype).clone()

    def packed(
        self, name: str, kernels: Kernels, pack: Callable[[], Packed], *, is_expert: bool = False
    ) -> Packed:
        return pack()

    def leave(self, name: str) -> None:
        self._left.remove(name)

    def finish(self) -> None:
        assert not self._left, sorted(self._left)


def make_model(
    oracle: PreTrainedModel,
    kernels: Kernels,
    *,
    absorbed_max_query_tokens: int = 1 << 30,
    dtype: torch.dtype = torch.float32,
    config_changes: dict[str, Any] | None = None,
) -> DeepseekV3:
    """Build our model from the oracle's own configuration and tensors."""
    raw = oracle.config.to_diff_dict() | (config_changes or {})
    return DeepseekV3(
        parse_config(raw),
        OracleWeights(oracle, dtype),
        kernels,
        max_positions=oracle.config.max_position_embeddings,
        absorbed_max_query_tokens=absorbed_max_query_tokens,
    )


class Sequences:
    """Runs sequences through a model in chunks, over shuffled blocks of a NaN-poisoned cache."""

    def __init__(
        self, model: DeepseekV3, token_ids: Sequence[Sequence[int]], *, seed: int = 0
    ) -> None:
        self.model = model
        self.token_ids = [list(ids) for ids in token_ids]
        self.num_computed = [0] * len(self.token_ids)
        counts = [-(-len(ids) // BLOCK_TOKENS) for ids in self.token_ids]
        generator = torch.Generator().manual_seed(seed)
        blocks = (torch.randperm(sum(counts) + 2, generator=generator)).tolist()
        self.blocks = [[blocks.pop() for _ in range(count)] for count in counts]
        self.cache = LatentCache(
            num_layers=model.config.num_layers,
            num_blocks=sum(counts) + 2,
            row_width=model.config.cache_row_width,
            dtype=model.dtype,
            device="cpu",
        )
        self.cache.rows_LPBC.fill_(torch.nan)

    def step(self, num_tokens: Sequence[int]) -> Tensor:
        """Compute the next `num_tokens[i]` tokens of each sequence; returns their logits."""
        batch = self._batch(num_tokens)
        for i, count in enumerate(num_tokens):
            self.num_computed[i] += count
        return self.model.logits(self.model.forward(batch, self.cache))

    def run(self, chunk: int) -> list[Tensor]:
        """Compute everything, `chunk` tokens of every sequence a step: logits per sequence."""
        pieces: list[list[Tensor]] = [[] for _ in self.token_ids]
        while counts := self._remaining(chunk):
            for piece, logits in zip(pieces, self.step(counts).split(counts), strict=True):
                piece.append(logits)
        return [torch.cat(piece) for piece in pieces]

    def _remaining(self, chunk: int) -> list[int]:
        left = [len(ids) - n for ids, n in zip(self.token_ids, self.num_computed, strict=True)]
        return [min(chunk, n) for n in left] if any(left) else []

    def _batch(self, num_tokens: Sequence[int]) -> ForwardBatch:
        ids, positions, slots, contexts = [], [], [], []
        for i, count in enumerate(num_tokens):
            start = self.num_computed[i]
            ids += self.token_ids[i][start : start + count]
            positions += range(start, start + count)
            slots += [
                self.blocks[i][p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS
                for p in range(start, start + count)
            ]
            contexts.append(start + count)
        width = max(len(blocks) for blocks in self.blocks) + 1
        garbage = 2_147_480_000
        tables = [blocks + [garbage] * (width - len(blocks)) for blocks in self.blocks]
        starts = torch.tensor([0, *num_tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return ForwardBatch(
            token_ids_T=torch.tensor(ids, dtype=torch.int64),
            positions_T=torch.tensor(positions, dtype=torch.int64),
            slots_T=torch.tensor(slots, dtype=torch.int64),
            query_start_B1=starts,
            context_lens_B=torch.tensor(contexts, dtype=torch.int32),
            block_tables_BM=torch.tensor(tables, dtype=torch.int32),
            max_query_tokens=max(num_tokens, default=0),
        )


def random_ids(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


@torch.no_grad()
def oracle_logits(oracle: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """Return the oracle's logits of a whole sequence, `[T, V]`."""
    return oracle(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
