"""Small samples done right: Student's t for a few seeds, differences paired by seed, Holm's correction.

For whole degrees of freedom the distribution of |t| is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4), so
nothing is looked up or approximated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BETTER, WORSE, SAME, UNKNOWN = "better", "worse", "no measurable difference", "too few seeds"
_ROUNDING = 1e-12
"""A spread below this share of the mean is none."""


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
    """Lower end of the 95 % interval; None with fewer than two seeds, or without any spread to judge by."""
    high: float | None
    p_value: float | None


def share_within(t: float, freedom: int) -> float:
    """P(|T| <= t) for Student's T."""
    if math.isinf(t):
        return 1.0
    angle = math.atan(t / math.sqrt(freedom))
    cosine2 = math.cos(angle) ** 2
    odd = freedom % 2
    term, total = 1.0, 0.0
    for idx in range((freedom - odd) // 2):
        total += term
        term *= cosine2 * (2 * idx + 1 + odd) / (2 * idx + 2 + odd)
    if odd:
        return 2.0 / math.pi * (angle + math.sin(angle) * math.cos(angle) * total)
    return math.sin(angle) * total


def critical_t(freedom: int, share: float = 0.95) -> float:
    """The t with P(|T| <= t) = share."""
    low, high = 0.0, 1.0
    while share_within(high, freedom) < share:
        low, high = high, 2.0 * high
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        low, high = (middle, high) if share_within(middle, freedom) < share else (low, middle)
    return high


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean, from the spread with n - 1; None with fewer than two values."""
    if len(values) < 2:
        return None
    centre = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values))


def mean_of(values: Sequence[float]) -> Mean:
    """At least one value."""
    return Mean(math.fsum(values) / len(values), len(values), standard_error(values))


def paired_difference(ours: Mapping[int, float], first: Mapping[int, float]) -> Difference | None:
    """Ours minus first over the seeds that both have, with its t-interval; None where they share no seed.

    Seeds that all have the very same difference tell nothing about its spread: scores of few documents are coarse. Then
    there is no interval, unless the difference is 0.
    """
    found = [ours[seed] - first[seed] for seed in sorted(ours.keys() & first.keys())]
    if not found:
        return None
    mean, error = math.fsum(found) / len(found), standard_error(found)
    if error is None or 0.0 < abs(mean) * _ROUNDING >= error:
        return Difference(mean, len(found), None, None, None)
    margin = critical_t(len(found) - 1) * error
    return Difference(mean, len(found), mean - margin, mean + margin, _p_value(mean, error, len(found) - 1))


def _p_value(mean: float, error: float, freedom: int) -> float:
    if error == 0.0:
        return 1.0
    return max(0.0, 1.0 - share_within(abs(mean) / error, freedom))


def verdict(difference: Difference, more_is_better: bool) -> str:
    """Better or worse only where the interval leaves 0 out."""
    if difference.low is None or difference.high is None:
        return UNKNOWN
    if difference.low <= 0.0 <= difference.high:
        return SAME
    return BETTER if (difference.value > 0.0) == more_is_better else WORSE


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number: below 0.05, the chance of one false finding or more is below 5 %."""
    order = sorted(range(len(p_values)), key=lambda idx: p_values[idx])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, idx in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[idx]))
        corrected[idx] = largest
    return corrected
