"""Small statistics of an evaluation: intervals by bootstrap, pairings with strangers, cosines.

Everything random is a function of the seed. Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from mmldlm import randomness

Progress = Callable[[str, int, int], None]
"""Called with the name of a part, how much of it is done, and how much there is."""

NUM_RESAMPLES = 1000
# First word after the seed in every key of the evaluation, so that no two of its parts share numbers.
CHOICE, STRANGERS, BOOTSTRAP, BOUND, DECODE, ENCODE = range(101, 107)


@dataclass(frozen=True)
class Estimate:
    """A number with its uncertainty over documents."""

    value: float
    standard_error: float
    low: float
    """Lower end of the 95 % interval."""
    high: float
    """Upper end of the 95 % interval."""

    def to_json(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


def ratio_estimate(numerators: np.ndarray, denominators: np.ndarray, seed: int) -> Estimate:
    """sum(numerators) / sum(denominators) over documents, with a percentile bootstrap over the documents.

    The resamples depend on the seed and the number of documents alone, so two estimates are paired.
    """
    values = np.empty(NUM_RESAMPLES)
    count = len(numerators)
    index = np.arange(count)
    for resample in range(NUM_RESAMPLES):
        key = randomness.make_key(seed, BOOTSTRAP, resample)
        rows = (randomness.uniform(key, randomness.ORDER, index) * np.float64(count)).astype(np.int64)
        values[resample] = numerators[rows].sum() / denominators[rows].sum()
    low, high = np.quantile(values, [0.025, 0.975])
    value = float(numerators.sum() / denominators.sum())
    return Estimate(value, float(values.std(ddof=1)), float(low), float(high))


def mean_estimate(values: np.ndarray, seed: int) -> Estimate:
    """Mean over documents with its bootstrap interval."""
    return ratio_estimate(values.astype(np.float64), np.ones(len(values)), seed)


def strangers(count: int, seed: int) -> np.ndarray:
    """For each document another one: (count,) a permutation without a fixed point, from 2 documents on.

    The documents are put on a circle in random order, and each one gets its neighbour.
    """
    assert count >= 2, "one document has no stranger"
    circle = randomness.permute(np.arange(count), count, randomness.make_key(seed, STRANGERS))
    partner = np.empty(count, dtype=np.int64)
    partner[circle] = np.roll(circle, -1)
    return partner


def choose(count: int, size: int, seed: int) -> np.ndarray:
    """`count` different positions of `size`, in random order; 0 means all."""
    count = min(count, size) or size
    return randomness.permute(np.arange(count), size, randomness.make_key(seed, CHOICE))


def unit(latents: np.ndarray) -> np.ndarray:
    """(n, S, C) -> (n, S*C) such that the dot product of two rows is the mean cosine of their slots."""
    lengths = np.linalg.norm(latents.astype(np.float64), axis=-1, keepdims=True)
    scaled = latents / np.maximum(lengths, np.finfo(np.float64).tiny)
    return (scaled / np.sqrt(latents.shape[1])).reshape(len(latents), -1)


def cosine(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(n, S, C), (n, S, C) -> (n,), mean over slots."""
    return np.einsum("nc,nc->n", unit(left), unit(right))
