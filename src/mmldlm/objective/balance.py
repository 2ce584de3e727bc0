"""How text and latent are balanced against each other, besides their fixed weights.

The balance is a pair of factors, one for each modality, in memory that never moves: recorded graphs read it. Row
weights are multiplied with them, so the loss of a step is still a sum over micro-batches and ranks of local sums
divided by counts known beforehand.
Shapes: M = 2 modalities (text, latent).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.config import ObjectiveConfig

_SMOOTHING = 0.1
"""Share of a new measurement of gradient norms; the first ones are averaged."""
_LARGEST_LOG_RATIO = math.log(1000.0)


class GradientNorm(nn.Module):
    """Factors under which the gradients of text and latent have norms in the ratio of their weights.

    With norms g and g' of text and latent and weights w and w', the factors m / g and m / g' do this, and with the mean
    norm m = (w g + w' g') / (w + w') the norms add up to what they add up to without factors. Both are functions of
    g / g' alone.
    """

    weights: Tensor
    log_ratio: Tensor
    measured: Tensor

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__()
        weights = torch.tensor([config.text_weight, config.latent_weight])
        self.register_buffer("weights", weights, persistent=False)
        self.every = config.balance_every
        self.last = 0
        """The step at which the norms were measured last; a checkpoint keeps it."""
        self.register_buffer("log_ratio", torch.zeros(()))  # of text to latent, smoothed
        self.register_buffer("measured", torch.zeros(()))

    def factors(self) -> Tensor:
        """(M,), each above 0; one if nothing was measured yet."""
        ratio = self.log_ratio.exp()
        text, latent = self.weights / self.weights.sum()
        return torch.stack([text + latent / ratio, text * ratio + latent])

    def due(self, step: int) -> bool:
        """Whether the norms are to be measured from a step on, counted from 0: at the first one with both losses after
        `every` more steps. At first some heads pass no gradient on, so not at the very first."""
        return step // self.every > self.last // self.every

    @torch.no_grad()
    def settle(self, norms: Tensor, step: int) -> None:
        """Take in a measurement (M,) of a step, on the device; one that is not finite, or 0, changes nothing."""
        self.last = step
        log_ratio = norms[0].log() - norms[1].log()
        good = torch.isfinite(log_ratio).float()
        bounded = torch.nan_to_num(log_ratio).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        share = torch.clamp(1.0 / (self.measured + 1.0), min=_SMOOTHING) * good
        self.log_ratio.lerp_(bounded, share)
        self.measured.add_(good)

    @torch.no_grad()
    def fields(self) -> dict[str, Any]:
        """The factors for the log. Waits for the device."""
        text, latent = self.factors().tolist()
        return {"text_factor": text, "latent_factor": latent}


def norms_of_shared(text: Sequence[Tensor | None], latent: Sequence[Tensor | None]) -> Tensor:
    """(M,): norms of two lists of gradients, or of their norms, over the parameters that both losses reach."""
    both = [(a, b) for a, b in zip(text, latent, strict=True) if a is not None and b is not None]
    return torch.stack([torch.nn.utils.get_total_norm(list(part)) for part in zip(*both, strict=True)])


def build_balance(config: ObjectiveConfig, *, text: bool, latent: bool) -> GradientNorm | None:
    """The balance of a run that has these losses; None where the weights stay as they are."""
    return GradientNorm(config) if config.balance == "gradient_norm" and text and latent else None
