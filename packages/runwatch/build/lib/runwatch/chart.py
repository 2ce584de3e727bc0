"""Curves in a terminal: braille dots, two by four to a letter, with the range beside them."""

from __future__ import annotations

import math

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BARS = "▁▂▃▄▅▆▇█"


def braille(steps: list[float], values: list[float | None], width: int, height: int) -> list[str]:
    """`height` lines of `width` letters; where values are missing or not finite there is a gap."""
    finite = value_range(values)
    grid = [[0] * width for _ in range(height)]
    if finite is not None and math.isfinite(finite[1] - finite[0]):
        low, high = _span(*finite)
        first, length = steps[0], max(steps[-1] - steps[0], 1e-12)
        before: tuple[int, int] | None = None
        for step, value in zip(steps, values, strict=True):
            if value is None or not math.isfinite(value):
                before = None
                continue
            row = int((high - value) / (high - low) * (4 * height - 1))
            now = int((step - first) / length * (2 * width - 1)), row
            for x, y in _line(before or now, now):
                grid[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
            before = now
    return ["".join(chr(0x2800 + cell) for cell in line) for line in grid]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Dots of a straight line between two points."""
    count = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    shares = [idx / count for idx in range(count + 1)]
    return [
        (round(start[0] + share * (end[0] - start[0])), round(start[1] + share * (end[1] - start[1])))
        for share in shares
    ]


def _span(low: float, high: float) -> tuple[float, float]:
    room = (high - low) or abs(high) or 1.0
    return low - 0.02 * room, high + 0.02 * room


def value_range(values: list[float | None]) -> tuple[float, float] | None:
    """Smallest and largest finite value."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


def bars(values: list[float | str | None]) -> str:
    """One block a value, from the smallest to the largest; a dot where there is none."""
    finite = [value for value in values if isinstance(value, int | float)]
    if not finite:
        return "·" * len(values)
    low, room = min(finite), (max(finite) - min(finite)) or 1.0
    shown = (
        f"{_BARS[int((value - low) / room * 7)]}" if isinstance(value, int | float) else "·"
        for value in values
    )
    return "".join(shown)
