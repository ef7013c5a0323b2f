"""Feed-forward blocks: the gated MLP, and the mixture of experts with its fp32 router."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whalepod.ep_comm.routed_experts import ExpertPlacement, LocalPlacement
from whalepod.kernels.interface import GateConfig, Kernels, Packed
from whalepod.models.config import ModelConfig
from whalepod.models.weights import Weights


class GatedMlp:
    """down(silu(gate(x)) * up(x)): a dense layer, or the shared experts of a mixture."""

    def __init__(
        self, hidden: int, intermediate: int, weights: Weights, prefix: str, kernels: Kernels
    ) -> None:
        self._kernels = kernels

        def pack() -> Packed:
            gate = weights.take(f"{prefix}.gate_proj.weight", (intermediate, hidden))
            up = weights.take(f"{prefix}.up_proj.weight", (intermediate, hidden))
            down = weights.take(f"{prefix}.down_proj.weight", (hidden, intermediate))
            return kernels.pack_gated_mlp(torch.cat([gate, up]), down)

        self._packed = weights.packed(prefix, kernels, pack)

    def __call__(self, x_TH: Tensor, add_to_TH: Tensor | None = None) -> Tensor:
        return self._kernels.gated_mlp(x_TH, self._packed, add_to_TH)


class MixtureOfExperts:
    """Shared experts for every token, routed experts by choice (DeepSeek-V3 report, 2.1.2)."""

    def __init__(
        self,
        config: ModelConfig,
        gate: GateConfig,
        weights: Weights,
        prefix: str,
        kernels: Kernels,
        placement: ExpertPlacement | None = None,
    ) -> None:
        """placement: which experts to load, and what computes the others; None: all are here."""
        self._kernels = kernels
        self._gate = gate
        num_experts, hidden = gate.num_experts, config.hidden_size
        placement = placement or LocalPlacement(kernels, num_experts)
        self._router = kernels.pack_router(
            weights.take(f"{prefix}.gate.weight", (num_experts, hidden), torch.float32)
        )
        self._bias_E = (
            weights.take(f"{prefix}.gate.e_score_correction_bias", (num_experts,), torch.float32)
            if config.has_gate_bias
            else None
        )
        self._shared = (
            GatedMlp(
                hidden,
                config.num_shared_experts * config.moe_intermediate_size,
                weights,
                f"{prefix}.shared_experts",
                kernels,
            )
            if config.num_shared_experts
            else None
        )
        owned = placement.owned
        _leave_others(num_experts, weights, prefix, owned)

        def pack(experts: Sequence[int]) -> Packed:
            return kernels.pack_experts(*_stack_experts(config, weights, prefix, experts))

        packed = weights.packed(f"{prefix}.experts", kernels, lambda: pack(owned), is_expert=True)
        self.expert_bytes = sum(tensor.nbytes for tensor in kernels.packed_parts(packed)[0])
        self._routed = placement.routed(packed, prefix, lambda expert: pack([expert]))

    def __call__(self, x_TH: Tensor) -> Tensor:
        ids_TK, weights_TK = self._kernels.route(x_TH, self._router, self._bias_E, self._gate)
        if self._routed.is_replayable:
            y_TH = self._routed(x_TH, ids_TK, weights_TK)
        else:
            y_TH = self._kernels.eager(lambda: self._routed(x_TH, ids_TK, weights_TK), x_TH)
        return y_TH if self._shared is None else self._shared(x_TH, add_to_TH=y_TH)

    def join(self, x_0H: Tensor) -> None:
        """Take part in what other ranks compute, without tokens of this one (`x_0H` has none)."""
        num_choices = self._gate.num_experts_per_token
        ids_0K = torch.empty(0, num_choices, dtype=torch.int64, device=x_0H.device)
        self._routed(x_0H, ids_0K, torch.empty(0, num_choices, device=x_0H.device))


def _leave_others(num_experts: int, weights: Weights, prefix: str, owned: Sequence[int]) -> None:
    """Tell `weights` that other ranks read the experts that are not `owned`."""
    for expert in set(range(num_experts)).difference(owned):
        for part in ("gate_proj", "up_proj", "down_proj"):
            weights.leave(f"{prefix}.experts.{expert}.{part}.weight")


def _stack_experts(
    config: ModelConfig, weights: Weights, prefix: str, experts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Copy the experts one by one into `[E, 2 I, H]` (gate rows, then up rows) and `[E, H, I]`."""
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    gate_up = down = None
    for i, expert in enumerate(experts):
        name = f"{prefix}.experts.{expert}"
        gate = weights.take(f"{name}.gate_proj.weight", (inner, hidden))
        if gate_up is None or down is None:
            gate_up = gate.new_empty(len(experts), 2 * inner, hidden)
            down = gate.new_empty(len(experts), hidden, inner)
        gate_up[i, :inner] = gate
        gate_up[i, inner:] = weights.take(f"{name}.up_proj.weight", (inner, hidden))
        down[i] = weights.take(f"{name}.down_proj.weight", (hidden, inner))
    assert gate_up is not None, experts
    assert down is not None, experts
    return gate_up, down
