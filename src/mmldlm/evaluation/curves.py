"""Scored tokens gathered into equal buckets of time.

Shapes: B buckets, R tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass
class Curve:
    """Sums per bucket; tokens may be added pack by pack."""

    tokens: np.ndarray
    """(B,) number of scored tokens."""
    nats: np.ndarray
    correct: np.ndarray

    @classmethod
    def empty(cls, num_buckets: int) -> Self:
        """No tokens yet."""
        return cls(*(np.zeros(num_buckets) for _ in range(3)))

    def add(self, place: np.ndarray, nats: np.ndarray, correct: np.ndarray) -> None:
        """Add tokens (R,) whose place in [0, 1] says the bucket."""
        size = len(self.tokens)
        bucket = np.minimum((place * size).astype(np.int64), size - 1)
        self.tokens += np.bincount(bucket, minlength=size)
        self.nats += np.bincount(bucket, nats, size)
        self.correct += np.bincount(bucket, correct, size)

    def to_json(self) -> list[dict[str, float | int | None]]:
        """One entry per bucket; means are null where there is no token."""
        size = len(self.tokens)
        rows: list[dict[str, float | int | None]] = []
        for idx, count in enumerate(self.tokens):
            sums = {"nats": self.nats[idx], "accuracy": self.correct[idx]}
            means = {name: float(value / count) if count else None for name, value in sums.items()}
            rows.append({"low": idx / size, "high": (idx + 1) / size, "num_tokens": int(count), **means})
        return rows
