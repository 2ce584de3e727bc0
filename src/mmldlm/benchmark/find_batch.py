"""The largest batch that fits and the fastest one, under a memory limit.

A batch is a whole step in one micro-batch. Its size is doubled until one does not fit, then the gap is halved, in
multiples of a unit, until it is a sixteenth of the size or less. Every try is a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.ladder import Row, row_of
from mmldlm.benchmark.trial import Bench, Trial

KEY = "batch.tokens_per_step"
_FINENESS = 16
_MOST_TOKENS = 2**26
"""Beyond this nobody asks: the search ends even where everything fits."""


@dataclass
class Try:
    """One batch size."""

    tokens: int
    row: Row


@dataclass
class Search:
    """Every size that was tried, in order of size."""

    tries: list[Try] = field(default_factory=list)
    partial: bool = False
    stopped_by: str | None = None
    """A failure that has nothing to do with memory."""

    @property
    def fitting(self) -> list[Try]:
        """The sizes that went through."""
        return [one for one in self.tries if one.row.failure is None]

    @property
    def largest(self) -> Try | None:
        """The largest batch that fits."""
        return max(self.fitting, key=lambda one: one.tokens, default=None)

    @property
    def fastest(self) -> Try | None:
        """The batch with most tokens per second."""
        return max(self.fitting, key=_speed, default=None)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "key": KEY,
            "largest": self.largest.tokens if self.largest else None,
            "fastest": self.fastest.tokens if self.fastest else None,
            "stopped_by": self.stopped_by,
            "tries": [{"tokens_per_step": one.tokens, **one.row.to_json()} for one in self.tries],
        }


def _speed(one: Try) -> float:
    return one.row.tokens_per_second.median if one.row.tokens_per_second else 0.0


class HaltError(Exception):
    """The search cannot go on; the reason is in the last trial."""


def find_batch(bench: Bench, arm: Arm, unit: int) -> Search:
    """Search over multiples of a unit; Ctrl-C keeps what there is."""
    found = Search()

    def fits(count: int) -> bool:
        tokens = count * unit
        settings = (*arm.settings, f"{KEY}={tokens}", "batch.micro_tokens=null")
        tried = Arm(f"{tokens} tokens", settings)
        trial = bench.run(tried)
        found.tries.append(Try(tokens, row_of(tried, [trial])))
        found.tries.sort(key=lambda one: one.tokens)
        return _went_through(trial)

    try:
        largest_multiple(fits, _MOST_TOKENS // unit)
    except HaltError as reason:
        found.stopped_by = str(reason)
    except KeyboardInterrupt:
        found.partial = True
    return found


def _went_through(trial: Trial) -> bool:
    if trial.failure is None:
        return True
    if trial.failure.kind in ("memory", "timeout"):
        return False
    raise HaltError(trial.failure.reason)


def largest_multiple(fits: Callable[[int], bool], most: int) -> int:
    """Largest count up to `most` that fits, to within a sixteenth; 0 if not even 1 does. `fits` must be monotone."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // _FINENESS):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low
