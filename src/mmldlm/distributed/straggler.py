"""Which rank the others wait for: each one counts the time that it spends by itself.

All ranks leave an agreement at the same moment. From then until a rank begins the next agreement or exchange it works
(or waits for its data) alone; afterwards it waits for the others. On a GPU this is the time of the host.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

LAG = 0.2
"""A rank is slow if it needs longer than the median rank by this share of the time that has passed."""
JUDGED_SECONDS = 30.0
"""Ranks are compared over so long, so that a short disturbance names nobody."""


class OwnTime:
    """Seconds that this rank spent by itself since the last line of the log."""

    def __init__(self) -> None:
        self.seconds, self.began = 0.0, time.perf_counter()
        self._left: float | None = None

    def leave(self) -> None:
        """An agreement is over."""
        self._left = time.perf_counter()

    def arrive(self) -> None:
        """The others may have to be waited for from now on."""
        if self._left is not None:
            self.seconds += time.perf_counter() - self._left
            self._left = None

    def pause(self) -> None:
        """What comes until the next agreement is not the same work on all ranks."""
        self._left = None

    def take(self) -> tuple[float, float]:
        """Own seconds and all seconds since the last call."""
        now, own, began = time.perf_counter(), self.seconds, self.began
        self.seconds, self.began = 0.0, now
        return own, now - began


class Straggler:
    """Judges the own seconds of all ranks whenever enough time has passed."""

    def __init__(self, judged_seconds: float = JUDGED_SECONDS) -> None:
        self.judged_seconds = judged_seconds
        self.rank: int | None = None
        self._seconds, self._elapsed = [0.0], 0.0

    def judge(self, seconds: Sequence[float], elapsed: float) -> bool:
        """Add a line of the log; whether another rank than before keeps the others waiting, or none any longer."""
        before = self._seconds if self._elapsed else [0.0] * len(seconds)
        self._seconds = [sum(pair) for pair in zip(before, seconds, strict=True)]
        self._elapsed += elapsed
        if self._elapsed < self.judged_seconds:
            return False
        slowest = max(range(len(seconds)), key=self._seconds.__getitem__)
        slow = self._seconds[slowest] - statistics.median_low(self._seconds) > LAG * self._elapsed
        last, self.rank, self._elapsed = self.rank, slowest if slow else None, 0.0
        return self.rank != last
