"""How far a latent prediction is from its target, per slot.

mse             mean over the channels of (prediction - target)^2
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

from torch import Tensor

from mmldlm.config import ObjectiveConfig

SHORTEST = 0.1
"""Root mean square below which a vector counts as of this length where its direction is needed: a zero vector has none,
and the gradient by a short one is large. Latents are normalised, so 1 is usual."""


def slot_errors(prediction: Tensor, target: Tensor, config: ObjectiveConfig) -> Tensor:
    """(N, S): loss of each slot. (N, S, C), (N, S, C)."""
    prediction = prediction.float()
    if config.latent_loss in ("cosine", "normalized_mse"):
        return _direction_errors(prediction, target, config.latent_loss)
    return (prediction - target).square().mean(-1)


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
