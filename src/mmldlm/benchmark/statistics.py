"""Numbers out of timings: medians with quartiles, ratios with bootstrap intervals, and verdicts against the noise.

A sample is a list of processes, each a list of values, one per timed block. Blocks of one process are alike for
reasons that have nothing to do with the arm (memory layout, clock rate, neighbours), so the bootstrap draws
processes first and blocks inside them second.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mmldlm.statistics import SAME

NUM_RESAMPLES = 2000
FASTER, SLOWER = "faster", "slower"

Sample = list[list[float]]
"""Values of each block, for each process; every process has as many."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        """The factor, at least 1, by which either end of the interval is away from "the same"."""
        return math.exp(max(abs(math.log(self.low)), abs(math.log(self.high))))


def spread(sample: Sample) -> Spread:
    """Median and quartiles over all blocks."""
    low, median, high = np.quantile(np.asarray(sample, dtype=np.float64), [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high))


def ratio(ours: Sample, theirs: Sample, seed: int) -> Ratio:
    """Median of ours over median of theirs; the interval is a percentile bootstrap over processes, then blocks."""
    rng = np.random.default_rng([seed, 0xBE])
    drawn = _medians(ours, rng) / _medians(theirs, rng)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Ratio(spread(ours).median / spread(theirs).median, float(low), float(high))


def _medians(sample: Sample, rng: np.random.Generator) -> np.ndarray:
    """Medians of resamples, each of as many processes as there are."""
    values = np.asarray(sample, dtype=np.float64)
    processes, blocks = values.shape
    chosen = rng.integers(processes, size=(NUM_RESAMPLES, processes, 1))
    drawn = values[chosen, rng.integers(blocks, size=(NUM_RESAMPLES, processes, blocks))]
    return np.median(drawn.reshape(NUM_RESAMPLES, -1), axis=1)


def verdict(speedup: Ratio, noise: Ratio | None) -> str:
    """Faster or slower only where the whole interval lies beyond what an arm differs from itself."""
    margin = noise.margin if noise is not None else 1.0
    if speedup.low > margin:
        return FASTER
    if speedup.high < 1.0 / margin:
        return SLOWER
    return SAME


def loss_difference(losses: list[float | None], reference: list[float | None]) -> float:
    """Mean over the steps of |loss - reference| / |reference|; infinite where a loss was not finite."""
    pairs = list(zip(losses, reference, strict=True))
    if not pairs or any(ours is None or theirs is None for ours, theirs in pairs):
        return math.inf
    ours, theirs = np.asarray(pairs, dtype=np.float64).T
    return float(np.mean(np.abs(ours - theirs) / np.maximum(np.abs(theirs), np.finfo(np.float64).tiny)))
