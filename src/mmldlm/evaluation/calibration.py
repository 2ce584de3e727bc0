"""Calibration: is the model right as often as it is sure? Expected calibration error over two kinds of buckets.

    error = sum over buckets of | sum of confidence - number of right answers | / number of answers

Shapes: R answers, n documents, B buckets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mmldlm.evaluation.quantities import LESS, Quantity

NUM_BUCKETS = 10


@dataclass
class Answers:
    """Predicted tokens: whose they are, how sure the model was, whether it was right. Added pack by pack."""

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
    """The calibration error in these buckets, document by document, so that documents can be resampled."""
    document, confidence, correct = answers.arrays()
    size = len(edges) - 1
    place = document * size + _buckets(confidence, edges)
    gaps = np.bincount(place, confidence - correct, num_documents * size).reshape(num_documents, size)
    counts = np.bincount(document, minlength=num_documents)
    return Quantity(title, LESS, np.column_stack([gaps, counts]), kind="gap")


def reliability(answers: Answers, edges: np.ndarray) -> list[dict[str, Any]]:
    """One entry per bucket; means are null where there is no answer."""
    _, confidence, correct = answers.arrays()
    bucket, size = _buckets(confidence, edges), len(edges) - 1
    counts = np.bincount(bucket, minlength=size)
    sure, right = np.bincount(bucket, confidence, size), np.bincount(bucket, correct, size)
    return [
        {
            "low": float(edges[idx]),
            "high": float(edges[idx + 1]),
            "num_tokens": int(count),
            "confidence": float(sure[idx] / count) if count else None,
            "accuracy": float(right[idx] / count) if count else None,
        }
        for idx, count in enumerate(counts)
    ]


def _buckets(confidence: np.ndarray, edges: np.ndarray) -> np.ndarray:
    return np.searchsorted(edges[1:-1], confidence, side="right")
