"""Names and shapes of all tensors of a checkpoint, as Hugging Face and DeepSeek write them."""

from __future__ import annotations

from collections.abc import Iterator

from whalepod.models.config import ModelConfig

NamedShape = tuple[str, tuple[int, ...]]


def checkpoint_tensors(config: ModelConfig) -> Iterator[NamedShape]:
    """Yield (name, shape) of every tensor, in file order: embedding, layers, head, MTP layer.

    The MTP layer repeats the embedding and the head, as in DeepSeek's own files.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    yield "model.embed_tokens.weight", vocabulary
    for index in range(config.num_layers):
        yield from _layer(config, index)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_word_embeddings:
        yield "lm_head.weight", vocabulary
    for index in range(config.num_layers, config.num_layers + config.num_mtp_layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.embed_tokens.weight", vocabulary
        yield f"{prefix}.enorm.weight", (config.hidden_size,)
        yield f"{prefix}.hnorm.weight", (config.hidden_size,)
        yield f"{prefix}.eh_proj.weight", (config.hidden_size, 2 * config.hidden_size)
        yield from _layer(config, index)
        yield f"{prefix}.shared_head.norm.weight", (config.hidden_size,)
        yield f"{prefix}.shared_head.head.weight", vocabulary


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether DeepSeek's FP8 checkpoints hold this tensor in e4m3.

    Projections and experts are; embeddings, head, norms, router and `eh_proj` are not.
    """
    kept = ("embed_tokens", "lm_head", "shared_head", "mlp.gate.", "eh_proj")
    return len(shape) == 2 and not any(part in name for part in kept)


def _layer(config: ModelConfig, index: int) -> Iterator[NamedShape]:
    prefix = f"model.layers.{index}"
    yield f"{prefix}.input_layernorm.weight", (config.hidden_size,)
    yield from _attention(config, f"{prefix}.self_attn")
    yield f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,)
    if config.is_moe_layer(index):
        yield from _experts(config, f"{prefix}.mlp")
    else:
        yield from _mlp(f"{prefix}.mlp", config.hidden_size, config.intermediate_size)


def _attention(config: ModelConfig, prefix: str) -> Iterator[NamedShape]:
    query_width = config.num_heads * config.qk_head_dim
    if config.q_lora_rank is None:
        yield f"{prefix}.q_proj.weight", (query_width, config.hidden_size)
    else:
        yield f"{prefix}.q_a_proj.weight", (config.q_lora_rank, config.hidden_size)
        yield f"{prefix}.q_a_layernorm.weight", (config.q_lora_rank,)
        yield f"{prefix}.q_b_proj.weight", (query_width, config.q_lora_rank)
    key_value_width = config.num_heads * (config.qk_nope_head_dim + config.v_head_dim)
    yield f"{prefix}.kv_a_proj_with_mqa.weight", (config.cache_row_width, config.hidden_size)
    yield f"{prefix}.kv_a_layernorm.weight", (config.kv_lora_rank,)
    yield f"{prefix}.kv_b_proj.weight", (key_value_width, config.kv_lora_rank)
    yield f"{prefix}.o_proj.weight", (config.hidden_size, config.num_heads * config.v_head_dim)


def _experts(config: ModelConfig, prefix: str) -> Iterator[NamedShape]:
    assert config.gate is not None
    yield f"{prefix}.gate.weight", (config.gate.num_experts, config.hidden_size)
    if config.has_gate_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (config.gate.num_experts,)
    for expert in range(config.gate.num_experts):
        yield from _mlp(
            f"{prefix}.experts.{expert}", config.hidden_size, config.moe_intermediate_size
        )
    if config.num_shared_experts:
        width = config.num_shared_experts * config.moe_intermediate_size
        yield from _mlp(f"{prefix}.shared_experts", config.hidden_size, width)


def _mlp(prefix: str, hidden_size: int, width: int) -> Iterator[NamedShape]:
    yield f"{prefix}.gate_proj.weight", (width, hidden_size)
    yield f"{prefix}.up_proj.weight", (width, hidden_size)
    yield f"{prefix}.down_proj.weight", (hidden_size, width)
