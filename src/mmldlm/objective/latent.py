"""Squared error of the latent prediction, per slot."""

from __future__ import annotations

from torch import Tensor


def slot_errors(prediction: Tensor, target: Tensor) -> Tensor:
    """(N, S): mean squared error over the channels of each slot. (N, S, C), (N, S, C)."""
    return (prediction.float() - target).square().mean(-1)


def latent_loss(per_slot: Tensor, is_target: Tensor) -> Tensor:
    """Sum over the scored slots. (N, S), (N,)."""
    return (per_slot * is_target[:, None]).sum()
