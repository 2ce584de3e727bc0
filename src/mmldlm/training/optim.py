"""The optimizers over all parameters of the denoiser, driven as one: AdamW, and Muon for matrices.

A parameter without a gradient is passed over: no step, no decay, no momentum. So what is frozen stays in its group with
all that the optimizer remembers of it, also in checkpoints, and goes on from there when it is trained again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.checkpoint.state import load_optimizer_tensors, optimizer_tensors
from mmldlm.config import OptimConfig
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import ParameterGroup, parameter_groups
from mmldlm.training.muon import Muon


@dataclass
class Optimizers:
    """Each parameter belongs to one of them."""

    parts: list[torch.optim.Optimizer]
    still: dict[nn.Parameter, slice] = field(default_factory=dict)
    """Rows that get no update although the rest of their matrix does, because nothing depends on them at present."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all."""
        return [group for part in self.parts for group in part.param_groups]

    def set_lr(self, lr: float) -> None:
        """The same rate for all groups."""
        for group in self.param_groups:
            group["lr"] = lr

    def gradients(self) -> list[Tensor]:
        """All that exist."""
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Forget the gradients, or make them zero where they are."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def unscale(self, scaler: torch.amp.GradScaler) -> None:
        """Take the scale of fp16 out of the gradients."""
        for part in self.parts if scaler.is_enabled() else []:
            scaler.unscale_(part)

    def step(self, scaler: torch.amp.GradScaler, skipped: Tensor, shrink: Tensor | None) -> None:
        """Update with gradients times `shrink`, or not at all where `skipped` is 1; decided on the device."""
        kept = [(rows, rows.clone()) for rows in self._still_rows()]
        for rows, _ in kept:
            rows.zero_()  # a matrix that is made orthogonal as a whole is made so without them
        for part in self.parts:
            _step(part, skipped, shrink)
        for rows, before in kept:
            rows.copy_(before)
        if scaler.is_enabled():
            scaler.update()

    def _still_rows(self) -> list[Tensor]:
        """Of the parameters themselves and of all that is kept for each of their values; their gradients are 0."""
        found = []
        for parameter, rows in self.still.items():
            kept = [value for part in self.parts for value in part.state.get(parameter, {}).values()]
            whole = [value for value in kept if isinstance(value, Tensor) and value.shape == parameter.shape]
            found += [tensor.detach()[rows] for tensor in (parameter, *whole)]
        return found

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """All that they keep."""
        return {key: tensor for part in self.parts for key, tensor in optimizer_tensors(part, names).items()}

    def load(self, names: Mapping[nn.Parameter, str], tensors: Mapping[str, Tensor]) -> None:
        """Put back what `tensors` gave; what belongs to no parameter is named by the first."""
        rest = dict(tensors)
        for part in reversed(self.parts):
            mine = {names[p] for group in part.param_groups for p in group["params"]}
            chosen = (
                rest
                if part is self.parts[0]
                else {k: v for k, v in rest.items() if k.partition(".")[2] in mine}
            )
            load_optimizer_tensors(part, names, dict(chosen))
            rest = {key: value for key, value in rest.items() if key not in chosen}


def _step(optimizer: torch.optim.Optimizer, skipped: Tensor, shrink: Tensor | None) -> None:
    if optimizer.defaults.get("fused") or isinstance(optimizer, Muon):
        # the kernel looks at these: nothing waits for the device, and clipping takes no pass of its own
        optimizer.found_inf = skipped  # type: ignore[attr-defined]
        optimizer.grad_scale = None if shrink is None else shrink.reciprocal()  # type: ignore[attr-defined]
        optimizer.step()
    elif not skipped.item():
        if shrink is not None:
            grads = [
                p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
            ]
            torch._foreach_mul_(grads, shrink)
        optimizer.step()


def build_optimizers(denoiser: Denoiser, config: OptimConfig, *, fused: bool) -> Optimizers:
    """Groups with and without decay."""
    groups = parameter_groups(denoiser)
    matrices = [_part(group, config, muon=True) for group in groups] if config.name == "muon" else []
    others = [_part(group, config, muon=False) for group in groups]
    adamw = torch.optim.AdamW(
        [group for group in others if group["params"]],
        lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused,
    )  # fmt: skip
    matrices = [group for group in matrices if group["params"]]
    return Optimizers(
        [adamw, Muon(matrices, lr=config.lr, momentum=config.muon_momentum)] if matrices else [adamw]
    )


def _part(group: ParameterGroup, config: OptimConfig, *, muon: bool) -> dict[str, Any]:
    """Parameters of a group that Muon takes (matrices inside blocks), or those that it leaves."""
    taken = config.name == "muon" and group.decay
    chosen = [p for name, p in group.parameters.items() if (taken and name.startswith("blocks.")) == muon]
    decay = config.weight_decay if group.decay else 0.0
    return {"params": chosen, "weight_decay": decay, "part": group.part}


def parameter_names(denoiser: Denoiser) -> dict[nn.Parameter, str]:
    """Parameter -> its name, for saving optimizer state."""
    return {parameter: name for name, parameter in denoiser.named_parameters()}
