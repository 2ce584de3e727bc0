"""A run's own past: robust baselines over a window, and curves that never grow beyond a number of points."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

TO_DEVIATION = 1.4826
"""Median deviation to standard deviation, for normal noise."""


class Window:
    """The last values, kept sorted too, so that medians cost next to nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.recent: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self.recent)

    def add(self, value: float) -> None:
        """Take a finite value in; the oldest leaves when the window is full."""
        recent, ordered = self.recent, self._sorted
        if len(recent) == self.size:
            del ordered[bisect_left(ordered, recent.popleft())]
        recent.append(value)
        insort(ordered, value)

    def is_full(self) -> bool:
        return len(self.recent) == self.size

    def clear(self) -> None:
        self.recent.clear()
        self._sorted.clear()

    def median(self) -> float:
        ordered = self._sorted
        half, odd = divmod(len(ordered), 2)
        if odd:
            return ordered[half]
        return 0.5 * (ordered[half - 1] + ordered[half]) if half else math.nan

    def lowest(self) -> float:
        return self._sorted[0]

    def quantile(self, share: float) -> float:
        return self._sorted[min(int(share * len(self._sorted)), len(self._sorted) - 1)]

    def deviation(self) -> float:
        """Robust standard deviation; at least a thousandth of the median, because logs are rounded."""
        center = self.median()
        spread = TO_DEVIATION * _middle(sorted(abs(value - center) for value in self._sorted))
        return max(spread, 1e-3 * abs(center), 1e-12)


class Recent:
    """The last values, sorted only when somebody asks: for what is asked about rarely."""

    def __init__(self, size: int) -> None:
        self.values: deque[float] = deque(maxlen=size)
        self.add = self.values.append

    def __len__(self) -> int:
        return len(self.values)

    def median(self) -> float:
        return _middle(sorted(self.values))

    def quantile(self, share: float) -> float:
        return sorted(self.values)[min(int(share * len(self.values)), len(self.values) - 1)]


def _middle(ordered: list[float]) -> float:
    count = len(ordered)
    if not count:
        return math.nan
    half = count // 2
    return ordered[half] if count % 2 else 0.5 * (ordered[half - 1] + ordered[half])


def median(values: Iterable[float]) -> float:
    """Median of finite values; nan when there are none."""
    return _middle(sorted(value for value in values if math.isfinite(value)))


def spread(values: list[float]) -> float:
    """Standard deviation; infinite rather than an error where numbers are too large to be squared."""
    mean = sum(values) / len(values)
    try:
        return math.sqrt(sum((value - mean) ** 2 for value in values) / len(values))
    except OverflowError:
        return math.inf


def sureness(excess: float) -> float:
    """How sure a finding is, from how many times its threshold was reached: 0.5 at the threshold, towards 1."""
    return round(min(0.99, 1.0 - 0.5 / max(excess, 1.0)), 2)


class RunningMean:
    """Whether the loss of a bar is the mean since its epoch began, as Keras prints it, and too young to be compared.

    From line to line such a mean changes less and less within an epoch; a loss by itself does not.
    """

    def __init__(self) -> None:
        self._first, self._last = 0.0, deque[float](maxlen=10)
        self._before, self._num_lines, self._length, self._num_means = math.nan, 0, 0, 0

    def is_young(self, loss: float, *, begins_epoch: bool) -> bool:
        """Take a loss in; whether it is the mean of less than half an epoch."""
        if begins_epoch:
            is_mean = self._num_lines >= 40 and self._first > 3 * sum(self._last)
            self._num_means = self._num_means + 1 if is_mean else 0
            self._length, self._num_lines, self._first = self._num_lines, 0, 0.0
        elif self._num_lines:
            change = abs(loss - self._before)
            self._last.append(change)
            self._first += change if self._num_lines <= 10 else 0.0
        self._before = loss
        self._num_lines += 1
        return self._num_means >= 2 and 2 * self._num_lines < self._length


class Curve:
    """Points of one value over the steps; when there are too many, neighbours are averaged."""

    def __init__(self, most: int = 600) -> None:
        self.most = most
        self.steps: list[float] = []
        self.values: list[float] = []
        self._stride, self._count, self._step, self._sum = 1, 0, -math.inf, 0.0

    def add(self, step: float, value: float) -> None:
        """Append a point; what is not finite is a gap, and a step that went back (rollback) cuts the curve there."""
        if step < self._step:
            self._cut(step)
        self._step = step
        self._count += 1
        self._sum += value
        if self._count >= self._stride:
            self.steps.append(step)
            self.values.append(self._mean())
            self._count, self._sum = 0, 0.0
            if len(self.steps) > self.most:
                self._halve()

    def _mean(self) -> float:
        mean = self._sum / self._count
        return mean if math.isfinite(mean) else math.nan

    def _cut(self, step: float) -> None:
        keep = bisect_left(self.steps, step)
        del self.steps[keep:], self.values[keep:]
        self._count, self._sum = 0, 0.0

    def _halve(self) -> None:
        pairs = range(0, len(self.steps) - 1, 2)
        self.values = [0.5 * (self.values[idx] + self.values[idx + 1]) for idx in pairs]
        self.steps = [self.steps[idx + 1] for idx in pairs]
        self._stride *= 2

    def points(self) -> tuple[list[float], list[float]]:
        """Steps and values, the unfinished last point included."""
        if not self._count:
            return self.steps, self.values
        return [*self.steps, self._step], [*self.values, self._mean()]
