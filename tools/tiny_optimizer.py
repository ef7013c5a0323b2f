"""The optimizer of the embedded model: Muon for matrices, AdamW for the rest, fp32 masters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon's quintic iteration (Jordan et al., 2024)."""


def orthogonalize(update: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of each matrix of `update` [..., M, N] near 1, in bf16."""
    a, b, c = _NEWTON_SCHULZ
    x = update.bfloat16()
    wide = x.shape[-2] > x.shape[-1]
    if wide:
        x = x.mT.contiguous()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    restored: Tensor = x.mT if wide else x
    return restored.float()


class MasterOptimizer:
    """Steps fp32 copies of bf16 weights, then writes them back.

    Matrices inside the layers take Muon's step, scaled to AdamW's usual size
    (0.2 * sqrt(longer side); Moonlight, section 2.2); embedding, head, router and norms AdamW's.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], weight_decay: float = 0.05) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        self._weight_decay = weight_decay
        matrices = [index for index, (name, item) in enumerate(named) if _is_matrix(name, item)]
        rest = [index for index in range(len(named)) if index not in set(matrices)]
        self._momentum = {index: torch.zeros_like(self.masters[index]) for index in matrices}
        self._is_gate_up = [name.endswith("gate_up_proj") for name, _ in named]
        self._rest = rest
        decayed = [self.masters[index] for index in rest if self.masters[index].dim() > 1]
        plain = [self.masters[index] for index in rest if self.masters[index].dim() == 1]
        groups = [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    @torch.no_grad()
    def step(self, learning_rate: float, clip_norm: float = 1.0) -> float:
        """Apply the gradients and drop them; returns their norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters]
        found = [gradient.float().norm() for gradient in gradients if gradient is not None]
        norm = float(torch.stack(found).norm())
        scale = min(1.0, clip_norm / (norm + 1e-6))
        for index in self._rest:
            gradient = gradients[index]
            self.masters[index].grad = None if gradient is None else gradient.float() * scale
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        for index, momentum in self._momentum.items():
            gradient = gradients[index]
            if gradient is not None:
                self._step_matrix(index, momentum, gradient.float(), learning_rate)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)
            parameter.grad = None
        return norm

    def _step_matrix(self, index: int, momentum: Tensor, gradient: Tensor, rate: float) -> None:
        momentum.lerp_(gradient, 0.05)
        update = gradient.lerp(momentum, 0.95)
        if self._is_gate_up[index]:  # two matrices in one, [E, 2I, H]
            update = update.view(-1, update.shape[-2] // 2, update.shape[-1])
        update = orthogonalize(update)
        master = self.masters[index]
        master.mul_(1.0 - rate * self._weight_decay)
        size = 0.2 * max(update.shape[-2:]) ** 0.5
        master.add_(update.reshape(master.shape), alpha=-rate * size)

    def state(self) -> dict[str, Any]:
        """Collect tensors that a resumed run needs."""
        return {
            "masters": self.masters,
            "momentum": self._momentum,
            "adamw": self._adamw.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        for master, stored in zip(self.masters, state["masters"], strict=True):
            master.copy_(stored)
        for index, stored in state["momentum"].items():
            self._momentum[index].copy_(stored)
        self._adamw.load_state_dict(state["adamw"])
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    outside = ("embed_tokens", "lm_head", "gate.weight")
    return (
        parameter.dim() > 1
        and not name.endswith(outside)
        and "embed_tokens" not in name
        and ("lm_head" not in name)
    )
