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
    text_weighting: str = choice("bound", "bound", "uniform")
    """bound: the continuous-time bound on the likelihood; uniform: cross-entropy in which every masked token counts the
    same, or every token of a noisy text with hybrid noise."""
    latent_loss: str = choice("mse", "mse", "huber", "cosine", "normalized_mse")
    """How far a predicted latent is from the right one. huber: squared error with a bounded gradient; cosine and
    normalized_mse: the direction of each slot, and its length by least squares; for prediction_type=clean only."""
    huber_scale: float = number(1.0, 0, above=True)
    """Error of a slot, as root mean square over its channels, beyond which huber grows linearly."""
    latent_weighting: str = choice("uniform", "uniform", "min_snr")
    """uniform: every latent time counts the same; min_snr: as an error of the clean latent weighs min(SNR, gamma)."""
    min_snr_gamma: float = number(5.0, 0, above=True)
    """Largest weight of an error of the clean latent under min_snr."""
    balance: str = choice("fixed", "fixed", "uncertainty", "gradient_norm")
    """What scales text and latent besides their weights. fixed: nothing; uncertainty: a learned log-variance for each
    and for each of eight buckets of its time; gradient_norm: factors under which their gradients have norms in the
    ratio of their weights. Length keeps its weight, and validation knows fixed weights only."""
    balance_every: int = number(100, 1)
    """Steps between two measurements of the gradient norms, each of which costs about as much as two steps."""
