"""config.json: published files are understood, broken ones are refused by key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.models.oracle import TINY, YARN
from whalepod.models.config import ConfigError, load_config, parse_config

V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def test_v3_scales_its_softmax_by_yarns_mscale_squared() -> None:
    config = parse_config(V3)
    assert config.softmax_scale == pytest.approx(0.1352, abs=5e-5)
    assert config.rope.table_factor == 1.0
    assert config.cache_row_width == 576


def test_v3_routes_by_groups_of_sigmoids_and_keeps_its_mtp_layer_apart() -> None:
    config = parse_config(V3)
    gate = config.gate
    assert gate is not None
    assert (gate.scoring, gate.group_score, gate.num_groups) == ("sigmoid", "top2_sum", 8)
    assert (config.has_gate_bias, config.num_layers, config.num_mtp_layers) == (True, 61, 1)
    assert [config.is_moe_layer(i) for i in (2, 3)] == [False, True]
    assert config.fp8 is not None
    assert config.fp8.block_rows == 128


def test_v2_lite_routes_by_softmax_without_groups_and_bias() -> None:
    config = parse_config(
        V3
        | {
            "model_type": "deepseek_v2",
            "topk_method": "greedy",
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "q_lora_rank": None,
            "quantization_config": None,
        }
    )
    gate = config.gate
    assert gate is not None
    assert (gate.scoring, gate.num_groups, gate.normalize_weights) == ("softmax", 1, False)
    assert (config.has_gate_bias, config.q_lora_rank) == (False, None)


def test_both_spellings_of_rope_mean_the_same() -> None:
    old = {k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta")}
    raw = {k: v for k, v in TINY.items() if k != "rope_parameters"} | {"model_type": "deepseek_v3"}
    spelled_old = parse_config(raw | {"rope_scaling": {"type": "yarn", **old}, "rope_theta": 1e4})
    spelled_new = parse_config(raw | {"rope_parameters": YARN})
    assert spelled_old == spelled_new
    assert spelled_new.rope.is_yarn


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_experts_per_tok": 200}, r"num_experts_per_token \(200\)"),
        ({"n_group": 7}, r"num_groups \(7\)"),
        ({"topk_method": "best"}, "topk_method"),
        ({"scoring_func": "relu"}, "scoring_func"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"moe_layer_freq": 2}, "moe_layer_freq"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({"rope_scaling": {"type": "yarn", "factor": "x"}}, "factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 0}}, "factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_theta": 0}, "theta"),
        ({"norm_topk_prob": "yes"}, "norm_topk_prob"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"eos_token_id": "end"}, "eos_token_id"),
        ({"eos_token_id": [1, True]}, "eos_token_id"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer >= 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer >= 1"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even, got 63"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        ({"rope_scaling": {"type": "yarn", "factor": float("inf")}}, "factor must be a number"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 0]}},
            r"weight_block_size must be \[rows, columns\], got \[128, 0\]",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        parse_config(V3 | changes)


@pytest.mark.parametrize("content", ["{", "[1]", '{"model_type": "deepseek_v3"}', "\xff"])
def test_a_broken_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is .* a checkpoint folder"):
        load_config(tmp_path)


def test_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(V3))
    assert load_config(tmp_path) == parse_config(V3)
