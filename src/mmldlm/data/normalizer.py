"""Mean and scale of each latent channel, gathered shard by shard in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

DEAD_CHANNEL = 1e-3
"""A channel that varies less than this share of the typical one is scaled by that share instead."""


@dataclass
class Moments:
    """Count, mean and summed squared distance from the mean, per channel."""

    count: int
    mean: np.ndarray
    square: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        """Moments of the rows of (rows, C), as stored."""
        mean = values.mean(axis=0, dtype=np.float64)
        square = np.zeros_like(mean)
        for start in range(0, len(values), 4096):  # a float64 copy of a few rows at a time
            square += ((values[start : start + 4096].astype(np.float64) - mean) ** 2).sum(axis=0)
        return cls(len(values), mean, square)

    def merged(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan et al.), without the cancellation of E[x^2] - E[x]^2."""
        count = self.count + other.count
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / count)
        square = self.square + other.square + step**2 * (self.count * other.count / count)
        return Moments(count, mean, square)

    def to_json(self) -> dict[str, Any]:
        """Exact in JSON: Python writes floats so that they read back the same."""
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of `to_json`."""
        return cls(value["count"], np.array(value["mean"]), np.array(value["square"]))


def fit_normalizer(parts: Sequence[Moments]) -> dict[str, list[float]]:
    """Mean and scale (standard deviation, with a floor) per channel."""
    total = parts[0]
    for part in parts[1:]:
        total = total.merged(part)
    deviation = np.sqrt(total.square / total.count)
    typical = float(np.sqrt((deviation**2).mean()))
    scale = np.maximum(deviation, DEAD_CHANNEL * typical) if typical > 0 else np.ones_like(deviation)
    return {"mean": total.mean.tolist(), "scale": scale.tolist()}
