"""Starts the embedded model with the circuit that copies, which it would take long to find.

Copying takes two steps (Elhage et al., 2021; Olsson et al., 2022): a head that tells each token
which token stands before it, and a later head that looks for the place whose token before equals
the current token, and copies what stands there. A model of this size finds the first step only
after many million tokens, as all heads of a layer share one rotary key. So it is given both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

_CONSTANT = 0.12
"""First value of every embedding, the same for all tokens: column 0 of a projection is a bias."""
_SHARPNESS = 20.0
_NUM_PAIRS = 8
"""How strongly, and with how many of the fastest rotary pairs, a head looks back."""
_MATCH_QUERY, _MATCH_KEY = 6.0, 3.0
"""How strongly the second step's queries and keys are scaled."""
_VALUE, _COPY = 0.25, 3.0


@torch.no_grad()
def start_with_copying(trunk: DeepseekV3ForCausalLM) -> None:
    """Overwrite parts of the random start of embedding, head and the first two attentions."""
    embedding = trunk.model.embed_tokens.weight
    embedding[:, 0] = _CONSTANT
    turn = torch.linalg.qr(torch.randn(embedding.shape[1], embedding.shape[1]))[0]
    trunk.lm_head.weight.copy_(embedding @ turn)
    first, second = (layer.self_attn for layer in trunk.model.layers[:2])
    _look_back(first, trunk.model.rotary_emb.inv_freq, float(embedding[:, 1:].std()))
    _match(first, second, turn)


def _look_back(attention: Any, frequencies: Tensor, deviation: float) -> None:
    """Make heads 0, 1, 2 look 1, 2, 3 tokens back.

    The rotary key becomes a constant k and head n's query k turned by n + 1 positions, so the
    score is a sum of cos(w (distance - n - 1)) over the fastest pairs.
    """
    sizes = attention.config
    normed = _CONSTANT / (deviation**2 + _CONSTANT**2 / sizes.hidden_size) ** 0.5
    size = _SHARPNESS**0.5 / normed
    key = attention.kv_a_proj_with_mqa.weight[sizes.kv_lora_rank :]
    queries = attention.q_proj.weight.unflatten(0, (sizes.num_attention_heads, -1))
    nope = sizes.qk_nope_head_dim
    for pair, frequency in enumerate(frequencies[:_NUM_PAIRS]):
        key[2 * pair, 0] = size
        for head in range(3):
            angle = frequency * (head + 1)
            queries[head, nope + 2 * pair, 0] = size * torch.cos(angle)
            queries[head, nope + 2 * pair + 1, 0] = -size * torch.sin(angle)


def _match(first: Any, second: Any, turn: Tensor) -> None:
    """Let layer 1's head 0 match the current token with the one before each place.

    Head 1 matches the token before with the one two before each place. Layer 0 writes a
    projection of those tokens, `read`, into a direction of its own each, `written`. What layer 1
    copies is turned into the space of the head's rows, which are the turned embeddings.
    """
    sizes = first.config
    width, hidden = sizes.qk_nope_head_dim, sizes.hidden_size
    read = first.kv_a_proj_with_mqa.weight[:width].clone()  # [32, H]
    written = torch.randn(2, hidden, width) * sizes.initializer_range
    values, outputs = _value_parts(first)
    for head in range(2):
        values[head] = 0.0
        values[head, :width, :width] = torch.eye(width) * _VALUE
        outputs[:, head, :width] = written[head]

    latent = second.kv_a_proj_with_mqa.weight
    latent[: 2 * width] = written.mT.reshape(2 * width, hidden)
    latent[2 * width : sizes.kv_lora_rank, 0] = 0.0
    keys = second.kv_b_proj.weight.unflatten(0, (sizes.num_attention_heads, -1))
    queries = second.q_proj.weight.unflatten(0, (sizes.num_attention_heads, -1))
    values, outputs = _value_parts(second)
    copied = latent[2 * width : sizes.kv_lora_rank]
    for head, matched in enumerate((read, written[0].mT)):
        queries[head, :width] = matched * _MATCH_QUERY
        queries[head, :width, 0] = 0.0
        keys[head, :width] = 0.0
        keys[head, :width, head * width : (head + 1) * width] = torch.eye(width) * _MATCH_KEY
        values[head] = 0.0
        values[head, : len(copied), 2 * width :] = torch.eye(len(copied)) * _VALUE
        outputs[:, head, : len(copied)] = turn.T @ copied.T * _COPY


def _value_parts(attention: Any) -> tuple[Tensor, Tensor]:
    """View the value rows of kv_b_proj as [N, D, R] and o_proj as [H, N, D]."""
    sizes = attention.config
    heads = sizes.num_attention_heads
    both = attention.kv_b_proj.weight.unflatten(0, (heads, -1))
    return both[:, sizes.qk_nope_head_dim :], attention.o_proj.weight.unflatten(1, (heads, -1))
