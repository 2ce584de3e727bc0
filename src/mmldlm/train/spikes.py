"""Jumps of the loss, judged per time bucket against the run's own history.

The raw mean of a diffusion loss depends on the times that were drawn; inside a bucket of times it does not. What is
usual is the median of the last lines, how much is too much follows from their spread and from their largest rise.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("text_loss_by_time", "latent_loss_by_time")
_HISTORY = 128
"""Lines that are remembered."""
_WARM_UP = 20
"""Lines before anything is judged."""
_DEVIATIONS = 8.0
_LEAST_RISE = 0.3
"""As a share of what is usual."""
_TAIL = 1.5
"""So many times the largest rise in memory."""


@dataclass
class Bucket:
    """The history of one bucket. A jump stays out of it, unless it lasts."""

    values: deque[float] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    outliers: int = 0

    def judge(self, value: float) -> float | None:
        """What was usual, if the value is a jump; then take it in."""
        usual = statistics.median(self.values) if self.values else value
        jump = len(self.values) >= _WARM_UP and value - usual > self._limit(usual)
        self.outliers = self.outliers + 1 if jump else 0
        if not jump or self.outliers > _WARM_UP:
            self.values.append(value)
        return usual if jump else None

    def _limit(self, usual: float) -> float:
        deviation = 1.4826 * statistics.median(abs(value - usual) for value in self.values)
        return max(
            _DEVIATIONS * deviation, _LEAST_RISE * abs(usual), _TAIL * (max(self.values) - usual), 1e-12
        )


@dataclass
class SpikeWatch:
    """Looks at the lines of the log."""

    buckets: defaultdict[tuple[str, int], Bucket] = field(default_factory=lambda: defaultdict(Bucket))

    def recall(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Begin anew with the history of a run that goes on."""
        self.buckets.clear()
        for line in lines:
            self.judge(line)

    def judge(self, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The jumps in a line: which loss, which bucket, its value, and what was usual."""
        found = []
        for kind in KINDS:
            values = fields.get(kind)
            for bucket, value in enumerate(values if isinstance(values, list) else []):
                if not isinstance(value, int | float) or not math.isfinite(value):
                    continue
                usual = self.buckets[kind, bucket].judge(value)
                if usual is not None:
                    found.append({"loss": kind, "bucket": bucket, "value": value, "usual": usual})
        return found
