"""Small statistics of an evaluation: intervals by bootstrap, pairings with strangers.

Everything random is a function of the seed. Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from mmldlm import randomness

Progress = Callable[[str, int, int], None]
"""Called with the name of a part, how much of it is done, and how much there is."""

NUM_RESAMPLES = 1000
# First word after the seed in every key of the evaluation, so that no two of its parts share numbers.
CHOICE, STRANGERS, BOOTSTRAP, BOUND, DECODE, ENCODE, LATENT_BOUND, GENERATE, PAIRS, SPLITS = range(101, 111)
_MOST_KEPT = 2**24
"""Resamples are kept where they are no more numbers than this (64 MiB), and drawn one at a time where they are."""
_ROWS_AT_ONCE = 64
"""Resamples whose random numbers exist at the same time."""


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


def resample_rows(count: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> Iterator[np.ndarray]:
    """Blocks (r, count) of documents drawn with repeats, `num_resamples` draws in all.

    They depend on the seed and the number of documents alone, so two estimates on the same documents are paired.
    """
    if count * num_resamples <= _MOST_KEPT:
        yield _drawn(count, seed, 0, num_resamples)
        return
    for resample in range(num_resamples):
        yield _drawn.__wrapped__(count, seed, resample, resample + 1)


@lru_cache(maxsize=4)
def _drawn(count: int, seed: int, first: int, last: int) -> np.ndarray:
    keys = randomness.make_key(seed, BOOTSTRAP, np.arange(first, last))[:, None]
    rows = np.empty((last - first, count), np.int32)
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        block = slice(start, start + _ROWS_AT_ONCE)
        numbers = randomness.uniform(keys[block], randomness.ORDER, np.arange(count)[None])
        rows[block] = (numbers * np.float64(count)).astype(np.int32)
    return rows


def bootstrap(
    statistic: Callable[[np.ndarray], np.ndarray],
    count: int,
    seed: int,
    num_resamples: int = NUM_RESAMPLES,
) -> np.ndarray:
    """(num_resamples,) values of a statistic of rows (r, count) -> (r,)."""
    return np.concatenate([statistic(rows) for rows in resample_rows(count, seed, num_resamples)])


def estimate(statistic: Callable[[np.ndarray], np.ndarray], count: int, seed: int) -> Estimate:
    """A statistic of all documents with a percentile bootstrap over the documents."""
    return summarize(float(statistic(np.arange(count)[None])[0]), bootstrap(statistic, count, seed))


def summarize(value: float, values: np.ndarray) -> Estimate:
    """A number with what its resamples (r,) say about it; those that have no value are left out."""
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return Estimate(value, math.nan, math.nan, math.nan)
    low, high = np.quantile(values, [0.025, 0.975])
    return Estimate(value, float(values.std(ddof=1)), float(low), float(high))


def ratio_estimate(numerators: np.ndarray, denominators: np.ndarray, seed: int) -> Estimate:
    """sum(numerators) / sum(denominators) over documents, with its bootstrap interval."""

    def ratio(rows: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return numerators[rows].sum(1) / denominators[rows].sum(1)

    return estimate(ratio, len(numerators), seed)


def mean_estimate(values: np.ndarray, seed: int) -> Estimate:
    """Mean over documents with its bootstrap interval."""
    return ratio_estimate(values.astype(np.float64), np.ones(len(values)), seed)


def jackknife_estimate(value: float, left_out: np.ndarray) -> Estimate:
    """For what repeats would distort, such as a count of different things: `left_out` has one document less each."""
    count = len(left_out)
    if count < 2:
        return Estimate(value, math.nan, math.nan, math.nan)
    error = float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))
    return Estimate(value, error, value - 1.96 * error, value + 1.96 * error)


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
