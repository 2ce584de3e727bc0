"""Many plain lines at once: columns of numbers, so that a long and healthy log costs little per line.

A block says exactly what its records would say one by one. It only holds lines that are alike and finite and whose
steps do not go back; whatever is different is read as single records.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from mmldlm.diagnostics.monitor.history import Window
from mmldlm.diagnostics.monitor.records import LARGEST, RATES, Record

FEWEST_LINES = 8
"""Fewer lines are not worth the trouble."""


@dataclass(slots=True)
class Block:
    """Lines of one file that hold the same values."""

    steps: list[int]
    times: list[float] | None
    values: dict[str, list[float]]
    """Per name one finite number a line."""
    order: list[float] = field(default_factory=list)
    """By what the lines are put in order with those of other files; never goes back."""
    _rates: tuple[str, list[float]] | None = None
    _medians: dict[tuple[str, int], tuple[list[float], list[float]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def record(self, idx: int) -> Record:
        """One line, as it would have been read alone."""
        time = self.times[idx] if self.times is not None else None
        values = {name: column[idx] for name, column in self.values.items()}
        return Record(step=self.steps[idx], time=time, values=values)

    def part(self, start: int, stop: int) -> Block:
        """Some of the lines."""
        times = self.times[start:stop] if self.times is not None else None
        values = {name: column[start:stop] for name, column in self.values.items()}
        return Block(self.steps[start:stop], times, values, self.order[start:stop])

    def rates(self) -> tuple[str, list[float]] | None:
        """Throughput of every line, and which kind it is, as `Record.rate` has it."""
        if self._rates is None:
            for name in RATES:
                if name in self.values:
                    self._rates = name, self.values[name]
                    return self._rates
            if "step_seconds" in self.values:
                self._rates = "steps_per_second", [1.0 / seconds for seconds in self.values["step_seconds"]]
        return self._rates

    def medians(self, name: str, window: Window) -> list[float]:
        """The median of a full window before the first line, and after each; two detectors may ask for the same."""
        key, start = (name, window.size), list(window.recent)
        known = self._medians.get(key)
        if known is None or known[0] != start:
            known = self._medians[key] = start, rolling_medians(start, self.values[name])
        return known[1]


def rolling_medians(start: list[float], values: list[float]) -> list[float]:
    """Medians of a window of `len(start)` values that moves over more of them, the first one of `start` itself."""
    ordered, size = sorted(start), len(start)
    half, other = size // 2, (size - 1) // 2
    found = [0.5 * (ordered[other] + ordered[half]) if half != other else ordered[half]]
    add = found.append
    for leaving, value in zip([*start, *values], values, strict=False):
        del ordered[bisect_left(ordered, leaving)]
        insort(ordered, value)
        add(0.5 * (ordered[other] + ordered[half]) if half != other else ordered[half])
    return found


def block_of(steps: list[int], times: list[float] | None, values: dict[str, list[float]]) -> Block | None:
    """A block of these columns, or nothing if they are not as plain as that."""
    if len(steps) < FEWEST_LINES or not values or not _is_rising(steps) or abs(steps[-1]) > 2**53:
        return None
    if not all(_is_finite(column) for column in values.values()) or 0 in values.get("step_seconds", ()):
        return None
    if times is not None and not _is_finite(times):
        return None
    return Block(steps, times, values)


def _is_rising(steps: list[int]) -> bool:
    return all(first <= second for first, second in pairwise(steps))


def _is_finite(column: Iterable[float]) -> bool:
    """Whether all numbers are finite, and of a size that numbers of logs have."""
    return sum(map(abs, column)) < LARGEST
