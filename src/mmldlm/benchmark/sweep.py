"""Time and memory against one setting, or against the length or the number of the synthetic documents.

Beside each point stands the work, in floating-point operations counted from the shapes: nothing should grow faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.ladder import Row, row_of, run_rounds
from mmldlm.benchmark.trial import Bench
from mmldlm.errors import UserError

STORE_KEYS = ("length", "documents")
"""Not settings, but properties of the synthetic store."""


@dataclass
class Point:
    """One value of the key."""

    value: str
    row: Row

    @property
    def number(self) -> float | None:
        """The value as a number, if it is one."""
        try:
            return float(self.value)
        except ValueError:
            return None


@dataclass
class Sweep:
    """All values of a key."""

    key: str
    points: list[Point] = field(default_factory=list)
    partial: bool = False

    def growth(self, what: str) -> list[float | None]:
        """A figure of every point over that of the first point that has it."""
        values = [getattr(point.row, what) for point in self.points]
        first = next((value for value in values if value), None)
        return [value / first if first and value is not None else None for value in values]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        points = [{"value": point.value, **point.row.to_json()} for point in self.points]
        return {"key": self.key, "points": points}


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """`section.key=a,b,c` as a key and its values."""
    key, _, values = text.partition("=")
    words = [word.strip() for word in values.split(",") if word.strip()]
    if not key.strip() or len(words) < 2 or len(set(words)) < len(words):
        raise UserError(
            f"--sweep {text}: write a setting and at least two different values, such as "
            f"batch.tokens_per_step=4096,8192,16384"
        )
    if key in STORE_KEYS and not all(word.isdigit() and int(word) > 0 for word in words):
        raise UserError(f"--sweep {text}: {key} needs whole numbers from 1")
    return key.strip(), words


def sweep_arms(key: str, values: list[str], make: Callable[[str, int], Path]) -> list[Arm]:
    """An arm for each value; `make` gives the synthetic store with another length or number of documents."""

    def settings(value: str) -> tuple[str, ...]:
        return (f"data.store={make(key, int(value))}",) if key in STORE_KEYS else (f"{key}={value}",)

    return [Arm(f"{key}={value}", settings(value)) for value in values]


def sweep(bench: Bench, key: str, arms: list[Arm]) -> Sweep:
    """Measure every value in interleaved rounds; Ctrl-C keeps what there is."""
    found = Sweep(key)
    try:
        run_rounds(bench, arms)
    except KeyboardInterrupt:
        found.partial = True
    for arm in arms:
        trials = [trial for trial in bench.trials if trial.arm == arm.name]
        found.points.append(Point(arm.name.partition("=")[2], row_of(arm, trials)))
    return found
