"""AdamW over the parts of the denoiser that get a loss."""

from __future__ import annotations

import torch
from torch import nn

from mmldlm.config import OptimConfig
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import parameter_groups


def freeze_parts(denoiser: Denoiser, trained: set[str]) -> None:
    """What gets no loss gets no gradient and no update, weight decay included."""
    for group in parameter_groups(denoiser):
        for parameter in group.parameters.values():
            parameter.requires_grad_(group.part in trained)


def build_optimizer(denoiser: Denoiser, config: OptimConfig, *, fused: bool) -> torch.optim.AdamW:
    """Groups with and without decay, of trainable parameters only."""
    groups = [
        {
            "params": list(group.parameters.values()),
            "weight_decay": config.weight_decay if group.decay else 0.0,
            "part": group.part,
        }
        for group in parameter_groups(denoiser)
        if all(parameter.requires_grad for parameter in group.parameters.values())
    ]
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused
    )


def parameter_names(denoiser: Denoiser) -> dict[nn.Parameter, str]:
    """Parameter -> its name, for saving optimizer state."""
    return {parameter: name for name, parameter in denoiser.named_parameters()}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The same rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
