"""The bounds on text and latents: their results, how hard tokens are over time, and calibration.

Expected calibration error = sum over buckets of |sum of confidence - number of right answers| / number of answers

Shapes: R tokens, n documents, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mmldlm.statistics import LESS, Estimate, Quantity

LATENT_NAMES = {"right": "right latent", "shuffled": "shuffled latent", "none": "no latent"}
TEXT_NAMES = {"right": "right text", "shuffled": "shuffled text", "none": "no text"}
"""The kinds of condition under which a bound is measured: the document's own, a stranger's, none."""
NUM_BUCKETS = 10


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
    perplexity_with_end: float | None = None
    """Of text and length together, with one end token per document in the count of tokens, as models count that write
    an end token; None where the length is given, and in results of older versions."""


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
    num_changed: int = 0
    """Texts that the tokenizer does not reproduce exactly: bits per byte and per character leave out what it loses."""

    @property
    def kinds(self) -> tuple[TextBound, TextBound, TextBound]:
        """In the order of `LATENT_NAMES`."""
        return self.right, self.shuffled, self.none


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

    @property
    def log_scale(self) -> float:
        """Mean log of the normaliser's scale: nats per dimension of two scales cannot be compared."""
        return round(self.right.nats_per_dimension_raw - self.right.nats_per_dimension.value, 9)

    @property
    def kinds(self) -> tuple[LatentBound, LatentBound, LatentBound]:
        """In the order of `TEXT_NAMES`."""
        return self.right, self.shuffled, self.none


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


class Answers(NamedTuple):
    """The most probable token of every masked one. (R,) each."""

    document: np.ndarray
    confidence: np.ndarray
    correct: np.ndarray
    """1 where it is right."""
    time: np.ndarray
    """In [0, 1], at which the token was masked."""
    nats: np.ndarray
    """Of the right token."""

    @classmethod
    def join(cls, parts: list[Answers]) -> Answers:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


def time_curve(answers: Answers, num_buckets: int = NUM_BUCKETS) -> list[TimeBucket]:
    """Mean nats and share of right answers over time."""
    bucket = np.minimum((answers.time * num_buckets).astype(np.int64), num_buckets - 1)
    counts = np.bincount(bucket, minlength=num_buckets)
    nats, right = (np.bincount(bucket, values, num_buckets) for values in (answers.nats, answers.correct))
    return [
        TimeBucket(
            idx / num_buckets, (idx + 1) / num_buckets, int(count), _mean(nats[idx], count), _mean(right[idx], count)
        )
        for idx, count in enumerate(counts)
    ]  # fmt: skip


def equal_width(num_buckets: int = NUM_BUCKETS) -> np.ndarray:
    """(B + 1,) edges of buckets of the same size."""
    return np.linspace(0.0, 1.0, num_buckets + 1)


def equal_mass(confidence: np.ndarray, num_buckets: int = NUM_BUCKETS) -> np.ndarray:
    """Edges of buckets with about as many answers each; fewer buckets where many answers are equally sure."""
    if not len(confidence):
        return equal_width(1)
    inner = np.unique(np.quantile(confidence, np.linspace(0.0, 1.0, num_buckets + 1)[1:-1]))
    return np.concatenate([[0.0], inner[(inner > 0.0) & (inner < 1.0)], [1.0]])


def calibration_error(answers: Answers, edges: np.ndarray, num_documents: int, title: str) -> Quantity:
    """The calibration error in these buckets, per document, so that documents can be resampled."""
    document, confidence, correct, *_ = answers
    size = len(edges) - 1
    place = document * size + _buckets(confidence, edges)
    gaps = np.bincount(place, confidence - correct, num_documents * size).reshape(num_documents, size)
    counts = np.bincount(document, minlength=num_documents)
    return Quantity(title, LESS, np.column_stack([gaps, counts]), kind="gap")


def reliability(answers: Answers, edges: np.ndarray) -> list[ConfidenceBucket]:
    """Mean confidence and share of right answers of each bucket."""
    confidence, correct = answers.confidence, answers.correct
    bucket, size = _buckets(confidence, edges), len(edges) - 1
    counts = np.bincount(bucket, minlength=size)
    sure, right = np.bincount(bucket, confidence, size), np.bincount(bucket, correct, size)
    return [
        ConfidenceBucket(
            float(edges[idx]), float(edges[idx + 1]), int(count), _mean(sure[idx], count), _mean(right[idx], count)
        )
        for idx, count in enumerate(counts)
    ]  # fmt: skip


def _buckets(confidence: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.searchsorted(edges[1:-1], confidence, side="right")


def _mean(total: float, count: float) -> float | None:
    return float(total / count) if count else None
