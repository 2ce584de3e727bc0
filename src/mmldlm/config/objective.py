"""Settings of the loss."""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.config.fields import choice, number


@dataclass
class ObjectiveConfig:
    """How the parts of the loss are weighted."""

    text_weight: float = number(1.0, 0)
    latent_weight: float = number(1.0, 0)
    length_weight: float = number(0.1, 0)
    text_weighting: str = choice("uniform", "uniform", "bound")
    """uniform: cross-entropy in which every masked token counts the same; bound: the continuous-time bound on the
    likelihood."""
    latent_loss: str = choice("mse", "mse", "cosine", "normalized_mse")
    """How far a predicted latent is from the right one. cosine and normalized_mse: the direction of each slot, and its
    length by least squares; for prediction_type=clean only."""
    balance: str = choice("gradient_norm", "gradient_norm", "fixed")
    """What scales text and latent besides their weights. gradient_norm: factors under which their gradients have norms
    in the ratio of their weights, measured in steps that have both losses; fixed: nothing. Length keeps its weight,
    and validation uses fixed weights."""
    balance_every: int = number(100, 1)
    """Steps between two measurements of the gradient norms, each of which costs about as much as two steps."""
