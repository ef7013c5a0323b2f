"""What a checkpoint's `config.json` says about the model, checked once."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whalepod.kernels.interface import GateConfig


class ConfigError(ValueError):
    """The checkpoint's configuration is missing, broken or of a model that is not served."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding, with YaRN's stretch when `factor` > 1 (YaRN paper; DeepSeek-V2 report)."""

    theta: float = 10000.0
    interleaved: bool = True
    """Pairs are (x[2i], x[2i+1]); False: (x[i], x[i + D/2])."""
    is_yarn: bool = False
    factor: float = 1.0
    original_max_positions: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    """Replaces what YaRN derives from `factor` for cosines and sines."""
    truncate: bool = True
    """Round the borders of YaRN's ramp to whole dimensions."""

    def __post_init__(self) -> None:
        if self.theta <= 1.0 or self.factor <= 0.0 or self.original_max_positions < 1:
            raise ConfigError(
                f"rope: theta ({self.theta}) must be > 1, factor ({self.factor}) > 0 and "
                f"original_max_position_embeddings ({self.original_max_positions}) >= 1"
            )

    @property
    def softmax_factor(self) -> float:
        """What YaRN multiplies into the softmax scale (DeepSeek-V3's inference code)."""
        return self._mscale(self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    @property
    def table_factor(self) -> float:
        """What YaRN multiplies into cosines and sines (transformers' rule for missing keys)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def _mscale(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Config:
    """Weights in e4m3 with one f32 scale per `block_rows x block_columns` (`weight_scale_inv`)."""

    block_rows: int = 128
    block_columns: int = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes of a DeepSeek-V2 or -V3 model, with one meaning whatever the checkpoint's family."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_shared_experts: int
    num_dense_layers: int
    """The first layers have a dense MLP; all later ones are mixtures of experts."""
    gate: GateConfig | None
    """None: every layer is dense."""
    has_gate_bias: bool
    rope: RopeConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_mtp_layers: int
    """0 or 1."""
    torch_dtype: str
    fp8: Fp8Config | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cache_row_width(self) -> int:
        """Values of one token in the latent cache of one layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """1 / sqrt(head dimension), times YaRN's factor (pitfall 1 of the MLA kernels)."""
        return float(self.qk_head_dim**-0.5 * self.rope.softmax_factor)

    def is_moe_layer(self, index: int) -> bool:
        return self.gate is not None and index >= self.num_dense_layers


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a checkpoint folder. Raises ConfigError that names file and key."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist: is {folder} a checkpoint folder?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(raw).__name__}")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Turn the JSON object of a deepseek_v3 or deepseek_v2 checkpoint into a ModelConfig."""
    model_type = raw.get("model_type")
    if model_type not in ("deepseek_v3", "deepseek_v2"):
        raise ConfigError(
            f"model_type is {model_type!r}; whalepod serves deepseek_v3 and deepseek_v2"
        )
    reader = _Reader(raw)
    num_experts = reader.integer("n_routed_experts", 0)
    num_layers = reader.positive("num_hidden_layers")
    if reader.integer("moe_layer_freq", 1) != 1:
        raise ConfigError(f"moe_layer_freq is {raw['moe_layer_freq']}; only 1 is served")
    if reader.boolean("attention_bias", False):
        raise ConfigError("attention_bias is true; only attention without biases is served")
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ConfigError(f"hidden_act is {activation!r}; only 'silu' is served")
    if (num_mtp_layers := reader.integer("num_nextn_predict_layers", 0)) > 1:
        raise ConfigError(
            f"num_nextn_predict_layers is {num_mtp_layers}; at most 1 multi-token-prediction layer "
            "is served"
        )
    if (rope_dim := reader.positive("qk_rope_head_dim")) % 2:
        raise ConfigError(f"config.json: qk_rope_head_dim must be even, got {rope_dim}")
    return ModelConfig(
        model_type=model_type,
        vocab_size=reader.positive("vocab_size"),
        hidden_size=reader.positive("hidden_size"),
        num_layers=num_layers,
        num_heads=reader.positive("num_attention_heads"),
        q_lora_rank=reader.optional_integer("q_lora_rank"),
        kv_lora_rank=reader.positive("kv_lora_rank"),
        qk_nope_head_dim=reader.positive("qk_nope_head_dim"),
        qk_rope_head_dim=rope_dim,
        v_head_dim=reader.positive("v_head_dim"),
        intermediate_size=reader.integer("intermediate_size"),
        moe_intermediate_size=reader.integer("moe_intermediate_size", 0),
        num_shared_experts=reader.integer("n_shared_experts", 0),
        num_dense_layers=reader.integer("first_k_dense_replace", 0) if num_experts else num_layers,
        gate=_parse_gate(reader, model_type, num_experts) if num_experts else None,
        has_gate_bias=raw.get("topk_method", _default_method(model_type)) == "noaux_tc",
        rope=_parse_rope(reader, model_type),
        rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
        max_position_embeddings=reader.positive("max_position_embeddings"),
        tie_word_embeddings=reader.boolean("tie_word_embeddings", False),
        num_mtp_layers=num_mtp_layers,
        torch_dtype=str(raw.get("dtype", raw.get("torch_dtype")) or "bfloat16"),
        fp8=_parse_fp8(raw.get("quantization_config")),
        bos_token_id=reader.optional_integer("bos_token_id"),
        eos_token_ids=_parse_token_ids(raw.get("eos_token_id")),
    )


def _default_method(model_type: str) -> str:
    return "noaux_tc" if model_type == "deepseek_v3" else "greedy"


def _parse_gate(reader: _Reader, model_type: str, num_experts: int) -> GateConfig:
    is_v3 = model_type == "deepseek_v3"
    method = reader.choice(
        "topk_method", ("noaux_tc", "greedy", "group_limited_greedy"), _default_method(model_type)
    )
    grouped = method != "greedy"
    scoring = reader.choice(
        "scoring_func", ("sigmoid", "softmax"), "sigmoid" if is_v3 else "softmax"
    )
    try:
        return GateConfig(
            num_experts=num_experts,
            num_experts_per_token=reader.integer("num_experts_per_tok"),
            num_groups=reader.integer("n_group", 1) if grouped else 1,
            num_selected_groups=reader.integer("topk_group", 1) if grouped else 1,
            scoring="sigmoid" if scoring == "sigmoid" else "softmax",
            group_score="top2_sum" if method == "noaux_tc" else "max",
            normalize_weights=reader.boolean("norm_topk_prob", is_v3),
            scaling_factor=reader.number("routed_scaling_factor", 1.0),
        )
    except ValueError as error:
        raise ConfigError(f"config.json: {error}") from None


def _parse_rope(reader: _Reader, model_type: str) -> RopeConfig:
    """Accept `rope_scaling` + `rope_theta`, and `rope_parameters` of transformers 5."""
    scaling = reader.raw.get("rope_scaling") or reader.raw.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError(f"rope_scaling must be an object, got {scaling!r}")
    inner = _Reader(scaling)
    theta = inner.number("rope_theta", reader.number("rope_theta", 10000.0))
    interleaved = reader.boolean("rope_interleave", True) or model_type == "deepseek_v2"
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta, interleaved=interleaved)
    if kind != "yarn":
        raise ConfigError(f"rope_scaling type is {kind!r}; 'yarn' or none is served")
    max_positions = reader.integer("max_position_embeddings")
    original = inner.integer("original_max_position_embeddings", max_positions)
    return RopeConfig(
        theta=theta,
        interleaved=interleaved,
        is_yarn=True,
        factor=inner.number("factor", max_positions / max(original, 1)),
        original_max_positions=original,
        beta_fast=inner.number("beta_fast", 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 1.0) or 1.0,
        mscale=inner.number("mscale", 0.0),
        mscale_all_dim=inner.number("mscale_all_dim", 0.0),
        attention_factor=inner.optional_number("attention_factor"),
        truncate=inner.boolean("truncate", True),
    )


def _parse_fp8(raw: Any) -> Fp8Config | None:
    if raw is None:
        return None
    if not isinstance(raw, Mapping) or raw.get("quant_method") != "fp8":
        raise ConfigError(f"quantization_config is {raw!r}; only quant_method 'fp8' is served")
    block = raw.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(map(_is_size, block))):
        raise ConfigError(f"weight_block_size must be [rows, columns], got {block!r}")
    return Fp8Config(block_rows=block[0], block_columns=block[1])


def _is_size(value: object) -> bool:
    return type(value) is int and value >= 1


def _parse_token_ids(raw: Any) -> tuple[int, ...]:
    ids = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(type(token) is int for token in ids):
        raise ConfigError(f"eos_token_id must be an integer or a list of integers, got {raw!r}")
    return tuple(ids)


class _Reader:
    """Reads typed keys of a JSON object; errors name the key and what was found."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def positive(self, key: str) -> int:
        value = self.integer(key)
        if not value:
            raise ConfigError(f"config.json: {key} must be an integer >= 1, got 0")
        return value

    def _value(self, key: str, default: object = None) -> Any:
        value = self.raw.get(key)
        value = default if value is None else value
        if value is None:
            raise ConfigError(f"config.json: the key {key!r} is missing")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"config.json: {key} must be an integer >= 0, got {value!r}")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.raw.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            raise ConfigError(f"config.json: {key} must be a number, got {value!r}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.raw.get(key) is None else self.number(key)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} must be true or false, got {value!r}")
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self._value(key, default)
        if value not in choices:
            raise ConfigError(f"config.json: {key} must be one of {choices}, got {value!r}")
        return str(value)
