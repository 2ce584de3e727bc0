"""Curves as inline SVG, for the page and the report; colours come from the style sheet, so it fits light and dark.

The scale is logarithmic where values spread over more than two decades, so that one run that diverged does not
flatten the others. A curve that ended in nan has a cross at its last finite point.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

from runwatch.words import number

LEFT, RIGHT, TOP, BOTTOM = 56, 8, 8, 20
_LOG_FROM = 100.0
_LONGER = 20.0
Place = Callable[[float, float], tuple[float, float]]


def curve_svg(
    name: str,
    curves: Sequence[dict[str, Any]],
    alerts: Sequence[dict[str, Any]] = (),
    rate_kind: str | None = None,
    *,
    width: int = 340,
    height: int = 150,
) -> str:
    """Curves over the steps, and upright lines where alerts began; empty if there is nothing to draw."""
    values = [
        value for curve in curves for value in curve["values"] if value is not None and math.isfinite(value)
    ]
    steps = [step for curve in curves for step in (curve["steps"][0], curve["steps"][-1])]
    if not values or max(len(curve["steps"]) for curve in curves) < 2:
        return ""
    scale = _Scale(min(values), max(values))
    first, last = min(steps), max(*steps, min(steps) + 1)
    across = _across(curves, first, last)

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + across(step) * (width - LEFT - RIGHT)
        return x, TOP + (1 - scale.share(value)) * (height - TOP - BOTTOM)

    label = f"{name} over the steps{', logarithmic' if scale.is_log else ''}"
    parts = [f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(label)}">']
    parts += _frame(name, scale, (first, last), rate_kind, (width, height))
    parts += [
        _mark(place(alert["first_step"], values[0])[0], alert, height)
        for alert in alerts
        if _inside(alert, first, last)
    ]
    for idx, curve in enumerate(curves):
        parts += _curve(curve, place, idx % 4)
    return "".join([*parts, "</svg>"])


def _across(curves: Sequence[dict[str, Any]], first: float, last: float) -> Callable[[float], float]:
    """From steps to shares of the width; logarithmic where one run has many times the steps of another."""
    if last - first > _LONGER * min(max(curve["steps"][-1] - first, 1.0) for curve in curves):
        return lambda step: math.log1p(step - first) / math.log1p(last - first)
    return lambda step: (step - first) / (last - first)


class _Scale:
    """From values to shares of the height."""

    def __init__(self, low: float, high: float) -> None:
        self.is_log = low > 0 and high / low > _LOG_FROM
        if self.is_log:
            low, high = math.log10(low), math.log10(high)
        if high <= low:
            room = abs(low) or 1.0
            low, high = low - room / 2, high + room / 2
        self.low, self.high = low, high

    def share(self, value: float) -> float:
        at = math.log10(max(value, 1e-300)) if self.is_log else value
        return (at - self.low) / (self.high - self.low)

    def value(self, share: float) -> float:
        at = self.low + share * (self.high - self.low)
        return 10**at if self.is_log else at


def _inside(alert: dict[str, Any], first: float, last: float) -> bool:
    return alert["first_step"] is not None and first <= alert["first_step"] <= last


def _frame(
    name: str, scale: _Scale, steps: tuple[float, float], rate_kind: str | None, size: tuple[int, int]
) -> list[str]:
    """Three level lines with their values, and the steps at both ends."""
    parts, (width, height) = [], size
    for share in (0.0, 0.5, 1.0):
        y = TOP + share * (height - TOP - BOTTOM)
        label = number(name, scale.value(1 - share), rate_kind).split(" ")[0]
        parts.append(f'<line class="level" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    scale_note = ", log scale" if scale.is_log else ""
    parts.append(f'<text x="{LEFT}" y="{height - 6}">step {steps[0]:,.0f}{scale_note}</text>')
    parts.append(f'<text x="{width - RIGHT}" y="{height - 6}" text-anchor="end">{steps[1]:,.0f}</text>')
    return parts


def _mark(x: float, alert: dict[str, Any], height: int) -> str:
    title = html.escape(f"{alert['code']} {alert['name']}")
    line = f'<line class="mark {alert["level"]}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - BOTTOM}">'
    return f"{line}<title>{title}</title></line>"


def _curve(curve: dict[str, Any], place: Place, color: int) -> list[str]:
    """Lines without the gaps, and a cross where the numbers ended but the run went on."""
    pieces: list[list[str]] = [[]]
    at: tuple[float, float] | None = None
    for step, value in zip(curve["steps"], curve["values"], strict=True):
        if value is None or not math.isfinite(value):
            pieces.append([])
            continue
        at = place(step, value)
        pieces[-1].append(f"{at[0]:.1f},{at[1]:.1f}")
    drawn = [" ".join(piece if len(piece) > 1 else [piece[0], piece[0]]) for piece in pieces if piece]
    parts = [f'<polyline class="curve c{color}" points="{points}"/>' for points in drawn]
    if at is not None and not pieces[-1]:
        x, y = at
        cross = f"M{x - 4:.1f},{y - 4:.1f}l8,8m0,-8l-8,8"
        parts.append(f'<path class="ended" d="{cross}"><title>nan from here on</title></path>')
    return parts
