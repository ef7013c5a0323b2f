"""AdamW over fp32 copies of bf16 weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class MasterOptimizer:
    """Steps fp32 masters of the given weights, then writes them back in the weights' own dtype.

    Matrices decay, norms do not. A weight without gradient (frozen) keeps its value.
    """

    def __init__(self, named: list[tuple[str, nn.Parameter]], weight_decay: float = 0.05) -> None:
        self.parameters = [parameter for _, parameter in named]
        self.masters = [parameter.detach().float().clone() for parameter in self.parameters]
        groups = [
            {"params": [m for m in self.masters if m.dim() > 1], "weight_decay": weight_decay},
            {"params": [m for m in self.masters if m.dim() == 1], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(groups, betas=(0.9, 0.97), fused=True)

    @torch.no_grad()
    def step(self, learning_rate: float, clip_norm: float = 1.0) -> float:
        """Apply the gradients and drop them; returns their norm before clipping."""
        gradients = [parameter.grad for parameter in self.parameters]
        found = [gradient.float().norm() for gradient in gradients if gradient is not None]
        norm = float(torch.stack(found).norm())
        scale = min(1.0, clip_norm / (norm + 1e-6))
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = None if gradient is None else gradient.float().mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.grad is not None:
                parameter.copy_(master)
                parameter.grad = None
        return norm

    def state(self) -> dict[str, Tensor]:
        """Collect tensors that a resumed run needs, under flat names."""
        tensors = {}
        for i, master in enumerate(self.masters):
            tensors[f"{i}.master"] = master
            for name, value in self._adamw.state[master].items():
                tensors[f"{i}.{name}"] = value
        return tensors

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take up a state that `state` gave, weights included."""
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            own = {
                name.partition(".")[2]: t for name, t in state.items() if name.startswith(f"{i}.")
            }
            master.copy_(own.pop("master"))
            parameter.copy_(master)
            self._adamw.state[master] = own
