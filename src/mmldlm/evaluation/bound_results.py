"""Results of the bounds on text and latents, and of calibration."""

from __future__ import annotations

from dataclasses import dataclass

from mmldlm.statistics import Estimate

LATENT_NAMES = {"right": "right latent", "shuffled": "shuffled latent", "none": "no latent"}
TEXT_NAMES = {"right": "right text", "shuffled": "shuffled text", "none": "no text"}
"""The kinds of condition under which a bound is measured: the document's own, a stranger's, none."""


@dataclass(frozen=True)
class Gain:
    """Nats saved by the right condition, against another document's and against none; paired."""

    shuffled: Estimate
    none: Estimate


@dataclass(frozen=True)
class TimeBucket:
    """Masked tokens at similar times; means are None where there is no token."""

    low: float
    high: float
    num_tokens: int
    nats: float | None
    accuracy: float | None


@dataclass(frozen=True)
class TextBound:
    """The bound on the cost of a text, under one kind of latent."""

    nats_per_token: Estimate
    bits_per_token: float
    perplexity: float
    bits_per_byte: Estimate | None
    bits_per_character: Estimate | None
    length_nats_per_document: float | None
    """What the length costs on top; None where the length is given."""
    time_curve: list[TimeBucket]


@dataclass(frozen=True)
class TextBounds:
    """The text bound with the right latent, with another document's, and with none."""

    right: TextBound
    shuffled: TextBound
    none: TextBound
    gain: Gain
    num_documents: int
    num_tokens: int
    num_draws: int


@dataclass(frozen=True)
class NoiseBucket:
    """Squared error of the predicted latent, per dimension, in a range of the signal-to-noise ratio."""

    low: float
    high: float
    squared_error: float | None
    """None where there is no draw."""


@dataclass(frozen=True)
class LatentBound:
    """The bound on the cost of a latent, under one kind of text."""

    nats_per_dimension: Estimate
    bits_per_dimension: float
    nats_per_dimension_raw: float
    """In the coordinates of the encoder."""
    snr_curve: list[NoiseBucket]


@dataclass(frozen=True)
class LatentBounds:
    """The latent bound with the right text, with another document's, and with none."""

    right: LatentBound
    shuffled: LatentBound
    none: LatentBound
    gain: Gain
    normal_nats_per_dimension: float
    """What a standard normal costs."""
    reconstruction_nats_per_dimension: float
    snr: float
    """The signal-to-noise ratio at which the bound ends."""
    num_documents: int
    num_dimensions: int
    num_draws: int


@dataclass(frozen=True)
class Bounds:
    """Both bounds; None for a side that was not trained."""

    text: TextBounds | None
    latent: LatentBounds | None


@dataclass(frozen=True)
class ConfidenceBucket:
    """Predicted tokens of similar confidence; means are None where there is no token."""

    low: float
    high: float
    num_tokens: int
    confidence: float | None
    accuracy: float | None


@dataclass(frozen=True)
class Reliability:
    """Expected calibration error over some buckets."""

    error: Estimate
    buckets: list[ConfidenceBucket]


@dataclass(frozen=True)
class LatentCalibration:
    """Calibration under one kind of latent, in two kinds of buckets."""

    equal_width: Reliability
    equal_mass: Reliability


@dataclass(frozen=True)
class Calibration:
    """Calibration of the token probabilities with the right latent, with another document's, and with none."""

    right: LatentCalibration
    shuffled: LatentCalibration
    none: LatentCalibration
