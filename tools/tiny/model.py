"""The embedded model as it is trained: transformers' DeepseekV3 with an MTP layer beside it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

from whalepod.tools.tiny.start import start_with_copying
from whalepod.tools.tiny.tokenizer import VOCAB_SIZE

NUM_LAYERS = 4
_ROW_STEP = 64
MAX_POSITIONS = 16_384

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 768,
    "moe_intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.0,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "max_position_embeddings": MAX_POSITIONS,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
"""config.json of the checkpoint, with DeepSeek's own keys."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit root-mean-square in fp32, as transformers' DeepseekV3RMSNorm does."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def causal_softmax(scores: Tensor) -> Tensor:
    """Normalise scores [B, T, T] over the columns up to the diagonal, in fp32."""
    T = scores.shape[-1]
    row, column = torch.arange(T).unsqueeze(1), torch.arange(T)
    return torch.where(column <= row, scores, -1e9).float().softmax(-1).to(scores.dtype)


@dataclass(frozen=True, slots=True)
class Loops:
    """The three elementwise loops that training spends most of its time in."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    swiglu: Callable[[Tensor], Tensor] = swiglu
    softmax: Callable[[Tensor], Tensor] = causal_softmax


def compiled_loops() -> Loops:
    """Fuse each loop into one pass over memory; needs a C++ compiler."""
    return Loops(
        *(torch.compile(loop, dynamic=True) for loop in (rms_norm, swiglu, causal_softmax))
    )


def causal_attention(
    loops: Loops,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally with two batched GEMMs: on short rows faster than the fused CPU kernel.

    Rows start at position 0 and are padded on the right, so no other mask is needed.
    """
    B, N, T, _ = query.shape
    q, k, v = (x.reshape(B * N, T, -1) for x in (query * scaling, key, value))
    weights = loops.softmax(torch.bmm(q, k.transpose(1, 2)))
    return torch.bmm(weights, v).view(B, N, T, -1).transpose(1, 2).contiguous(), None


def padded_experts(
    loops: Loops, experts: Any, x_TH: Tensor, index_TK: Tensor, weight_TK: Tensor
) -> Tensor:
    """Run all experts as one batched GEMM over equally many rows each, equal to transformers' own.

    The number of rows is rounded up, so that few shapes occur and each is compiled once; rows
    that fill up repeat token 0 and are not read back. Counts are left in `experts.num_rows_E`.
    """
    num_tokens, top_k = index_TK.shape
    num_experts = int(experts.num_experts)
    order = index_TK.reshape(-1).argsort(stable=True)
    num_rows = torch.bincount(index_TK.reshape(-1), minlength=num_experts)
    experts.num_rows_E = num_rows
    most = -(-int(num_rows.max()) // _ROW_STEP) * _ROW_STEP
    starts = (torch.arange(num_experts) * most) - (num_rows.cumsum(0) - num_rows)
    slots = torch.arange(len(order)) + starts.repeat_interleave(num_rows)
    tokens = torch.zeros(num_experts * most, dtype=torch.long)
    tokens[slots] = order // top_k
    rows_ERH = x_TH.index_select(0, tokens).view(num_experts, most, -1)
    middle = loops.swiglu(torch.bmm(rows_ERH, experts.gate_up_proj.mT))
    outputs_ERH = torch.bmm(middle, experts.down_proj.mT)
    back = torch.empty_like(order)
    back[order] = slots
    y_TKH = outputs_ERH.flatten(0, 1).index_select(0, back).view(num_tokens, top_k, -1)
    return torch.bmm(weight_TK.to(x_TH.dtype).unsqueeze(1), y_TKH).squeeze(1)


def hf_config(loops: Loops) -> DeepseekV3Config:
    """Build transformers' configuration, with the fast training paths chosen."""
    AttentionInterface.register("tiny_causal", partial(causal_attention, loops))
    ALL_EXPERTS_FUNCTIONS.register("tiny_padded", partial(padded_experts, loops))
    config = DeepseekV3Config(**copy.deepcopy(CONFIG))  # it completes nested dicts in place
    config._attn_implementation = "tiny_causal"
    config._experts_implementation = "tiny_padded"
    return config


def _norm(loops: Loops, module: Any, x: Tensor) -> Tensor:
    return loops.norm(x, module.weight, module.variance_epsilon)


class MtpLayer(nn.Module):
    """DeepSeek-V3's multi-token prediction module (report, 2.2); embedding and head are shared."""

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__()
        self.enorm = deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = deepseek.DeepseekV3DecoderLayer(config, NUM_LAYERS)
        self.shared_head_norm = deepseek.DeepseekV3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
        """Combine the next token's embedding with the trunk's post-norm hidden, both [B, T, H]."""
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        x = self.block(x, position_embeddings=positions)
        normed: Tensor = self.shared_head_norm(x)
        return normed


class TinyModel(nn.Module):
    """The trunk and its MTP layer, trained together."""

    def __init__(self, loops: Loops = Loops()) -> None:
        super().__init__()
        config = hf_config(loops)
        self.trunk = DeepseekV3ForCausalLM(config)
        self.mtp = MtpLayer(config)
        self._init_mtp(config.initializer_range)
        start_with_copying(self.trunk)
        for module in self.modules():
            if isinstance(module, deepseek.DeepseekV3RMSNorm):
                module.forward = partial(_norm, loops, module)  # type: ignore[method-assign]

    def _init_mtp(self, deviation: float) -> None:
        for parameter in self.mtp.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=deviation)

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Return the trunk's hidden after the final norm, [B, T, H]."""
        output = self.trunk.model(ids_BT, use_cache=False)
        last: Tensor = output.last_hidden_state
        return last

    def mtp_hidden(self, ids_BT: Tensor, hidden_BTH: Tensor) -> Tensor:
        """Return the MTP hidden of rows 0..T-2, [B, T-1, H]: row i predicts token i + 2."""
        model = self.trunk.model
        position_ids = torch.arange(ids_BT.shape[1] - 1).unsqueeze(0)
        positions = model.rotary_emb(hidden_BTH, position_ids)
        output: Tensor = self.mtp(model.embed_tokens(ids_BT[:, 1:]), hidden_BTH[:, :-1], positions)
        return output

    def moe_layers(self) -> Iterator[Any]:
        """Yield every mixture of experts, the MTP layer's last."""
        for layer in (*self.trunk.model.layers, self.mtp.block):
            if hasattr(layer.mlp, "experts"):
                yield layer.mlp


def balance(model: TinyModel, rate: float) -> None:
    """Move each expert's selection bias by DeepSeek's rule: up if below the mean load, else down.

    Uses the rows counted in the last forward pass (V3 report, section 2.1.2).
    """
    for moe in model.moe_layers():
        if not hasattr(moe.experts, "num_rows_E"):
            continue  # the MTP layer has not run yet
        rows = moe.experts.num_rows_E.float()
        moe.gate.e_score_correction_bias += rate * torch.sign(rows.mean() - rows)


def checkpoint_tensors(model: TinyModel) -> dict[str, Tensor]:
    """Name every tensor as DeepSeek's checkpoints do: experts one by one, bias and router in fp32.

    The MTP layer's copies of embedding and head are left out: they are the trunk's.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.trunk.state_dict().items():
        tensors |= _split_experts(name, tensor)
    prefix = f"model.layers.{NUM_LAYERS}."
    for name, tensor in model.mtp.state_dict().items():
        plain = name.removeprefix("block.").replace("shared_head_norm", "shared_head.norm")
        tensors |= _split_experts(prefix + plain, tensor)
    return {name: _stored(name, tensor) for name, tensor in tensors.items()}


def _split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        found = {}
        for expert, weight in enumerate(tensor):
            gate, up = weight.chunk(2)
            found[f"{stem}{expert}.gate_proj.weight"] = gate
            found[f"{stem}{expert}.up_proj.weight"] = up
        return found
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return {f"{stem}{expert}.down_proj.weight": weight for expert, weight in enumerate(tensor)}
    return {name: tensor}


def _stored(name: str, tensor: Tensor) -> Tensor:
    in_fp32 = name.endswith("e_score_correction_bias")
    return tensor.detach().to(torch.float32 if in_fp32 else torch.bfloat16).contiguous()


def save_checkpoint(model: TinyModel, folder: Path) -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(checkpoint_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "do_sample": False}
    text = json.dumps(generation, indent=2) + "\n"
    (folder / "generation_config.json").write_text(text, encoding="utf-8")


def load_checkpoint(folder: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Read a checkpoint folder into a new model. Raises when a tensor is missing or unknown."""
    stored = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if changed := sorted(key for key in CONFIG if config.get(key) != CONFIG[key]):
        raise ValueError(
            f"{folder} was trained with other sizes ({', '.join(changed)}): serve it and score it "
            "through --url"
        )
    model = TinyModel()
    wanted = dict.fromkeys(checkpoint_tensors(model))
    if stored.keys() != wanted.keys():
        raise ValueError(f"{folder}: tensors differ: {sorted(stored.keys() ^ wanted.keys())[:4]}")
    trunk, mtp = model.trunk.state_dict(), model.mtp.state_dict()
    prefix = f"model.layers.{NUM_LAYERS}."
    for name, tensor in trunk.items():
        tensor.copy_(_joined(stored, name))
    for name, tensor in mtp.items():
        plain = name.removeprefix("block.").replace("shared_head_norm", "shared_head.norm")
        tensor.copy_(_joined(stored, prefix + plain))
    return set_dtype(model, dtype).eval()


def _joined(stored: dict[str, Tensor], name: str) -> Tensor:
    num_experts = CONFIG["n_routed_experts"]
    if name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        halves = ("gate_proj", "up_proj")
        return torch.stack(
            [
                torch.cat([stored[f"{stem}{e}.{half}.weight"] for half in halves])
                for e in range(num_experts)
            ]
        )
    if name.endswith("experts.down_proj"):
        stem = name.removesuffix("down_proj")
        return torch.stack([stored[f"{stem}{e}.down_proj.weight"] for e in range(num_experts)])
    return stored[name]


def set_dtype(model: TinyModel, dtype: torch.dtype) -> TinyModel:
    """Cast the weights; the router's bias stays in fp32."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    return model
