"""Squared error of the latent prediction, per slot."""

from __future__ import annotations

from torch import Tensor


def latent_loss(prediction: Tensor, target: Tensor, is_target: Tensor) -> Tensor:
    """Sum over the scored slots of the mean squared error of their channels. (N, S, C), (N, S, C), (N,)."""
    per_slot = (prediction.float() - target).square().mean(-1)
    return (per_slot * is_target[:, None]).sum()
