"""Shapes of models that come without trained weights, as the `config.json` of a checkpoint.

`v3-nano` and `v2-nano` are for tests, `v3-mini` for benchmarks on a CPU; `v3-layer` and `v2-lite`
have the published widths of DeepSeek-V3 and DeepSeek-V2-Lite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "ep_size": 1,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "moe_layer_freq": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_scaling": None,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "use_cache": True,
}

_V2 = _V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "n_group": 1,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "q_lora_rank": None,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
}

_NANO = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "max_position_embeddings": 4096,
}

_PUBLISHED_HEADS = {
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_YARN = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "v3-nano": _V3
    | _NANO
    | {
        "n_group": 4,
        "topk_group": 2,
        "q_lora_rank": 64,
        "num_nextn_predict_layers": 1,
    },
    "v2-nano": _V2 | _NANO,
    "v3-mini": _V3
    | _PUBLISHED_HEADS
    | {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "moe_intermediate_size": 256,
        "num_hidden_layers": 12,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 384,
        "max_position_embeddings": 8192,
        "num_nextn_predict_layers": 0,
    },
    "v3-layer": _V3
    | _PUBLISHED_HEADS
    | {
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "q_lora_rank": 1536,
        "max_position_embeddings": 163840,
        "num_nextn_predict_layers": 0,
        "rope_scaling": _YARN,
    },
    "v2-lite": _V2
    | _PUBLISHED_HEADS
    | {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "max_position_embeddings": 163840,
        "rope_scaling": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    },
}


def preset_config(preset: str, *, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object of a preset's `config.json`; `overrides` replaces single keys.

    Raises ValueError that lists the presets when there is none of this name.
    """
    if preset not in PRESETS:
        raise ValueError(f"there is no preset {preset!r}; presets are {', '.join(PRESETS)}")
    return dict(PRESETS[preset]) | dict(overrides or {})


def smaller(
    preset: str, *, num_layers: int | None = None, num_experts: int | None = None
) -> dict[str, int]:
    """Return the overrides that cut a preset to size; the last layer stays a mixture of experts."""
    overrides = {}
    if num_layers is not None:
        if num_layers < 1:
            raise ValueError(f"a model needs at least one layer, got {num_layers}")
        num_dense = preset_config(preset)["first_k_dense_replace"]
        overrides["num_hidden_layers"] = num_layers
        overrides["first_k_dense_replace"] = min(num_dense, num_layers - 1)
    if num_experts is not None:
        overrides["n_routed_experts"] = num_experts
    return overrides
