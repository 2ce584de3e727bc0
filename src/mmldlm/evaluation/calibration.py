"""Scored tokens in buckets: of time (how hard is a masked token?) and of confidence (is it right as often as sure?).

Expected calibration error = sum over buckets of |sum of confidence - number of right answers| / number of answers

Shapes: R tokens, n documents, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np

from mmldlm.evaluation.bound_results import ConfidenceBucket, LatentCalibration, Reliability, TimeBucket
from mmldlm.evaluation.context import Context
from mmldlm.evaluation.quantities import Quantity
from mmldlm.statistics import LESS

NUM_BUCKETS = 10


@dataclass
class TimeCurve:
    """Sums of scored tokens per bucket of time; tokens may be added pack by pack."""

    tokens: np.ndarray
    """(B,) number of scored tokens."""
    nats: np.ndarray
    correct: np.ndarray

    @classmethod
    def empty(cls, num_buckets: int = NUM_BUCKETS) -> Self:
        """No tokens yet."""
        return cls(*(np.zeros(num_buckets) for _ in range(3)))

    def add(self, time: np.ndarray, nats: np.ndarray, correct: np.ndarray) -> None:
        """Add tokens (R,) with their times in [0, 1]."""
        size = len(self.tokens)
        bucket = np.minimum((time * size).astype(np.int64), size - 1)
        self.tokens += np.bincount(bucket, minlength=size)
        self.nats += np.bincount(bucket, nats, size)
        self.correct += np.bincount(bucket, correct, size)

    def buckets(self) -> list[TimeBucket]:
        """Means of each bucket."""
        size = len(self.tokens)
        return [
            TimeBucket(
                idx / size, (idx + 1) / size, int(count),
                _mean(self.nats[idx], count), _mean(self.correct[idx], count),
            )
            for idx, count in enumerate(self.tokens)
        ]  # fmt: skip


@dataclass
class Answers:
    """Predicted tokens: their document, how sure the model was, whether it was right. Added pack by pack."""

    _document: list[np.ndarray] = field(default_factory=list)
    _confidence: list[np.ndarray] = field(default_factory=list)
    _correct: list[np.ndarray] = field(default_factory=list)

    def add(self, document: np.ndarray, confidence: np.ndarray, correct: np.ndarray) -> None:
        """(R,) each."""
        self._document.append(document.astype(np.int64))
        self._confidence.append(confidence)
        self._correct.append(correct)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """document, confidence and correct, (R,) each."""
        parts = (self._document, self._confidence, self._correct)
        document, confidence, correct = (np.concatenate(part) if part else np.empty(0) for part in parts)
        return document.astype(np.int64), confidence, correct


def measure_calibration(context: Context, answers: Answers, latent: str, name: str) -> LatentCalibration:
    """Calibration error and reliability diagram, in buckets of equal width and of equal mass."""
    count = len(context.selection.documents.lengths)

    def measure(kind: str, edges: np.ndarray) -> Reliability:
        title = f"calibration error, {name}, buckets of {kind.replace('_', ' ')}"
        quantity = calibration_error(answers, edges, count, title)
        error = context.record(f"calibration/{latent}/{kind}", quantity)
        return Reliability(error, reliability(answers, edges))

    return LatentCalibration(
        measure("equal_width", equal_width()), measure("equal_mass", equal_mass(answers.arrays()[1]))
    )


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
    document, confidence, correct = answers.arrays()
    size = len(edges) - 1
    place = document * size + _buckets(confidence, edges)
    gaps = np.bincount(place, confidence - correct, num_documents * size).reshape(num_documents, size)
    counts = np.bincount(document, minlength=num_documents)
    return Quantity(title, LESS, np.column_stack([gaps, counts]), kind="gap")


def reliability(answers: Answers, edges: np.ndarray) -> list[ConfidenceBucket]:
    """Mean confidence and share of right answers of each bucket."""
    _, confidence, correct = answers.arrays()
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
