"""How far a latent prediction is from its target, per slot, and how much each time counts.

mse             mean over the channels of (prediction - target)^2
huber           2 s^2 (sqrt(1 + mse / s^2) - 1): the mse of small errors, and linear in the error of large ones, so the
                gradient of a slot by its prediction is never longer than 2 s / sqrt(channels)
cosine          1 - cos(prediction, target), and the length
normalized_mse  mean over the channels of (prediction / |prediction| - target / |target|)^2, and the length, where |x|
                is the root mean square over the channels; away from zero this is 2 - 2 cos

The last two leave the length of a prediction free, but samplers mix it with noise, so it must be right. Beside them
the length is fitted by least squares along the predicted direction, (|prediction| - <direction, target>)^2: its
gradient only stretches, that of the direction only turns. The best prediction of targets of equal length is then their
mean, which is what samplers assume, just as for mse.
Shapes: N documents, S slots, C channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmldlm.config import ObjectiveConfig
from mmldlm.corruption.latent import LatentProcess

SHORTEST = 0.1
"""Root mean square below which a vector counts as of this length, where its direction is asked: a zero vector has none,
and the gradient by a short one is large. Latents are normalised, so 1 is usual."""


def slot_errors(prediction: Tensor, target: Tensor, config: ObjectiveConfig) -> Tensor:
    """(N, S): loss of each slot. (N, S, C), (N, S, C)."""
    prediction = prediction.float()
    if config.latent_loss in ("cosine", "normalized_mse"):
        return _direction_errors(prediction, target, config.latent_loss)
    error = (prediction - target).square().mean(-1)
    if config.latent_loss == "mse":
        return error
    # sqrt(1 + x) - 1 = x / (sqrt(1 + x) + 1) does not cancel for small errors
    return 2.0 * error / (torch.sqrt(1.0 + error / config.huber_scale**2) + 1.0)


def _direction_errors(prediction: Tensor, target: Tensor, kind: str) -> Tensor:
    length = _length(prediction)
    turned, wanted = prediction / length[..., None], target / _length(target)[..., None]
    if kind == "cosine":
        direction = 1.0 - (turned * wanted).mean(-1)
    else:
        direction = (turned - wanted).square().mean(-1)
    best_length = (turned * target).mean(-1).detach()
    return direction + (length - best_length).square()


def _length(vectors: Tensor) -> Tensor:
    """Root mean square over the channels, at least SHORTEST; its gradient is finite at zero."""
    return vectors.square().mean(-1).clamp(min=SHORTEST**2).sqrt()


def latent_loss(per_slot: Tensor, weight: Tensor) -> Tensor:
    """Sum over the scored slots. (N, S), (N,) weight of each document, 0 where its latent is not scored."""
    return (per_slot * weight[:, None]).sum()


def time_weight(process: LatentProcess, time: Tensor, config: ObjectiveConfig) -> Tensor:
    """(N,) weight of the errors at a time; finite also where the signal-to-noise ratio is 0 or infinite.

    min_snr: an error of the clean latent weighs min(snr, gamma). A mistake e of the clean latent is one of
    -(signal / sigma) e of the noise and of -e / sigma of the velocity, so these weigh min(snr, gamma) / snr and
    min(snr, gamma) sigma^2, the latter being min(snr, gamma) / (snr + 1) where variance is preserved.
    """
    if config.latent_weighting == "uniform":
        return torch.ones_like(time)
    gamma, sigma = config.min_snr_gamma, process.schedule.noise(time)
    snr = process.log_snr(time).exp()
    if process.prediction_type == "noise":
        return (gamma / snr).clamp(max=1.0)
    weight = snr.clamp(max=gamma)
    return weight * sigma**2 if process.prediction_type == "velocity" else weight
