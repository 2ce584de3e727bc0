"""Muon: momentum whose matrices are made orthogonal before they are applied. All of one shape are treated at once.

Keller Jordan, 2024. The update is scaled as in Moonlight (Liu et al., 2025), so that its size is that of AdamW and one
learning rate serves both. `found_inf` and `grad_scale` are read as PyTorch's fused AdamW reads them: on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon(torch.optim.Optimizer):
    """For matrices only."""

    found_inf: Tensor | None = None
    """1 where the step is to change nothing."""
    grad_scale: Tensor | None = None
    """What gradients are divided by first."""

    def __init__(self, params: Iterable[Any], *, lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update of every matrix that has a gradient."""
        for group in self.param_groups:
            for parameters in _by_shape(group["params"]):
                self._update(parameters, **{key: group[key] for key in ("lr", "momentum", "weight_decay")})

    def _update(self, parameters: list[Tensor], *, lr: float, momentum: float, weight_decay: float) -> None:
        buffers = [self._buffer(parameter) for parameter in parameters]
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if self.grad_scale is not None:
            grads = list(torch._foreach_div(grads, self.grad_scale))
        keep: float | Tensor = 1.0
        if self.found_inf is not None:
            keep = 1.0 - self.found_inf
            # a gradient equal to its average leaves the average as it is
            grads = [torch.where(self.found_inf > 0, b, g) for b, g in zip(buffers, grads, strict=True)]
        torch._foreach_lerp_(buffers, grads, 1.0 - momentum)
        ahead = torch._foreach_lerp(grads, buffers, momentum)
        updates = orthogonalize(torch.stack(ahead)).to(parameters[0].dtype)
        size = 0.2 * max(parameters[0].shape) ** 0.5
        for parameter, update in zip(parameters, updates.unbind(0), strict=True):
            parameter.mul_(1.0 - lr * weight_decay * keep)
            parameter.sub_(update * (lr * size * keep))

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"]
        assert isinstance(buffer, Tensor)
        return buffer


def _by_shape(parameters: list[Tensor]) -> list[list[Tensor]]:
    shapes: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            shapes.setdefault(parameter.shape, []).append(parameter)
    return list(shapes.values())


def orthogonalize(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> the same singular vectors with singular values near 1, by Newton-Schulz in bf16."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
