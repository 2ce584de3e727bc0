"""Statistics: bootstrap intervals over documents, Student's t over training seeds, Holm's correction.

Everything random is a function of the seed. Shapes: n documents, r resamples.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

NUM_RESAMPLES = 1000
MORE, LESS = "more", "less"
"""Which direction of a quantity is better."""
BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "no measurable difference", "too few seeds"
_STREAM = 103
"""Second word of the seed, so that no other part draws the same numbers."""
_MOST_AT_ONCE = 2**22
"""Document indices of resamples that exist at the same time."""
_ROUNDING = 1e-12
"""A spread below this share of the mean is rounding error."""

Statistic = Callable[[np.ndarray], np.ndarray]
"""Document indices (r, n) -> values (r,)."""


@dataclass(frozen=True)
class Estimate:
    """A number with its 95 % interval over documents; `float` gives the number alone."""

    value: float
    standard_error: float
    low: float
    high: float

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        return f"{self.value:.4g} ({self.low:.4g} to {self.high:.4g})"


def bootstrap(statistic: Statistic, count: int, seed: int, num_resamples: int = NUM_RESAMPLES) -> np.ndarray:
    """(num_resamples,) values of a statistic of documents drawn with replacement.

    The documents drawn depend on the seed and the count alone, so two statistics of the same documents are paired.
    """
    if count < 2:
        return statistic(np.zeros((num_resamples, count), dtype=np.int64))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", stats.DegenerateDataWarning
        )  # resamples without a value are left out later
        result = stats.bootstrap(
            (np.arange(count),),
            lambda rows, axis: statistic(rows),
            n_resamples=num_resamples,
            batch=max(1, min(num_resamples, _MOST_AT_ONCE // count)),
            vectorized=True,
            method="percentile",
            random_state=np.random.default_rng([seed, _STREAM]),
        )
    return np.asarray(result.bootstrap_distribution)


def estimate(statistic: Statistic, count: int, seed: int) -> Estimate:
    """A statistic of all documents with its percentile bootstrap interval."""
    return summarize(float(statistic(np.arange(count)[None])[0]), bootstrap(statistic, count, seed))


def summarize(value: float, resampled: np.ndarray) -> Estimate:
    """A number with the spread of its resampled values (r,); values that are not finite are left out."""
    resampled = resampled[np.isfinite(resampled)]
    if len(resampled) < 2:
        return Estimate(value, math.nan, math.nan, math.nan)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return Estimate(value, float(resampled.std(ddof=1)), float(low), float(high))


def ratio_estimate(numerators: np.ndarray, denominators: np.ndarray, seed: int) -> Estimate:
    """sum(numerators) / sum(denominators) over documents, with its bootstrap interval."""

    def ratio(rows: np.ndarray) -> np.ndarray:
        with np.errstate(invalid="ignore", divide="ignore"):
            return numerators[rows].sum(-1) / denominators[rows].sum(-1)

    return estimate(ratio, len(numerators), seed)


def mean_estimate(values: np.ndarray, seed: int) -> Estimate:
    """Mean over documents with its bootstrap interval."""
    return ratio_estimate(values.astype(np.float64), np.ones(len(values)), seed)


def jackknife_estimate(value: float, left_out: np.ndarray) -> Estimate:
    """For a count of distinct things, which repeats in a bootstrap would distort.

    `left_out` holds the value without each document in turn.
    """
    count = len(left_out)
    if count < 2:
        return Estimate(value, math.nan, math.nan, math.nan)
    error = float(np.sqrt((count - 1) / count * ((left_out - left_out.mean()) ** 2).sum()))
    margin = float(stats.norm.ppf(0.975)) * error
    return Estimate(value, error, value - margin, value + margin)


def bootstrap_p_value(differences: np.ndarray) -> float:
    """Two-sided, from resampled differences: how rarely they are on the other side of 0; at least 2 / (r + 1)."""
    differences = differences[np.isfinite(differences)]
    sides = ((differences <= 0).sum() + 1, (differences >= 0).sum() + 1)
    return float(min(2.0 * min(sides) / (len(differences) + 1), 1.0))


@dataclass(frozen=True)
class Mean:
    """A mean over seeds."""

    value: float
    count: int
    standard_error: float | None
    """None with fewer than two seeds."""


@dataclass(frozen=True)
class Difference:
    """A mean of differences paired by seed."""

    value: float
    count: int
    low: float | None
    """Lower end of the 95 % interval; None with fewer than two seeds, or where all seeds have the same difference."""
    high: float | None
    p_value: float | None


def mean_over_seeds(values: Sequence[float]) -> Mean:
    """Mean and standard error of at least one value."""
    error = float(stats.sem(values)) if len(values) > 1 else None
    return Mean(math.fsum(values) / len(values), len(values), error)


def paired_difference(ours: Mapping[int, float], first: Mapping[int, float]) -> Difference | None:
    """Ours minus first over the seeds that both have, with its t-interval; None where they share no seed.

    Seeds that all have the same difference say nothing about its spread (scores of few documents are coarse). Then
    there is no interval, unless the difference is 0.
    """
    values = [ours[seed] - first[seed] for seed in sorted(ours.keys() & first.keys())]
    if not values:
        return None
    mean = mean_over_seeds(values)
    if mean.standard_error == 0.0 == mean.value:
        return Difference(0.0, mean.count, 0.0, 0.0, 1.0)
    if mean.standard_error is None or mean.standard_error <= abs(mean.value) * _ROUNDING:
        return Difference(mean.value, mean.count, None, None, None)
    test = stats.ttest_1samp(values, 0.0)
    low, high = test.confidence_interval(0.95)
    return Difference(mean.value, mean.count, float(low), float(high), float(test.pvalue))


def verdict(difference: Difference, better: str) -> str:
    """Better or worse only where the interval excludes 0."""
    if difference.low is None or difference.high is None:
        return UNKNOWN
    if difference.low <= 0.0 <= difference.high:
        return SAME
    return BETTER if (difference.value > 0.0) == (better == MORE) else WORSE


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: below 0.05, the chance of one false finding or more is below 5 %."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    stepped = np.minimum(np.maximum.accumulate(factors * np.asarray(p_values, np.float64)[order]), 1.0)
    corrected = np.empty(len(p_values))
    corrected[order] = stepped
    return [float(value) for value in corrected]
