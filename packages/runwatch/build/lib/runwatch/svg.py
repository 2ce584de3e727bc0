"""Curves as inline SVG that takes its colours from the page, so that it is right in light and dark."""

from __future__ import annotations

import html
from typing import Any

from runwatch.chart import value_range
from runwatch.words import number

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 340, 150, 52, 8, 8, 20


def curve_svg(
    name: str, curve: dict[str, Any], alerts: list[dict[str, Any]], rate_kind: str | None = None
) -> str:
    """One curve over the steps; upright lines where alerts began."""
    steps, values = curve["steps"], curve["values"]
    span = value_range(values)
    if span is None or len(steps) < 2:
        return ""
    low, high = (
        span
        if span[1] > span[0]
        else (span[0] - (abs(span[0]) or 1) * 0.5, span[1] + (abs(span[1]) or 1) * 0.5)
    )
    first, last = steps[0], steps[-1] if steps[-1] > steps[0] else steps[0] + 1

    def place(step: float, value: float) -> tuple[float, float]:
        x = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return x, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(name)} over the steps">'
    ]
    parts += _frame(name, low, high, first, last, rate_kind)
    parts += [
        _mark(place(alert["first_step"], low)[0], alert) for alert in alerts if _inside(alert, first, last)
    ]
    parts += [f'<polyline class="curve" points="{piece}"/>' for piece in _pieces(steps, values, place)]
    return "".join([*parts, "</svg>"])


def _inside(alert: dict[str, Any], first: float, last: float) -> bool:
    return alert["first_step"] is not None and first <= alert["first_step"] <= last


def _frame(name: str, low: float, high: float, first: float, last: float, rate_kind: str | None) -> list[str]:
    """Three level lines with their values, and the steps at both ends."""
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = TOP + share * (HEIGHT - TOP - BOTTOM)
        label = number(name, high - share * (high - low), rate_kind).split(" ")[0]
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{html.escape(label)}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 6}">step {first:,.0f}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{last:,.0f}</text>')
    return parts


def _mark(x: float, alert: dict[str, Any]) -> str:
    title = html.escape(f"{alert['code']} {alert['name']}")
    line = f'<line class="mark {alert["level"]}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
    return f"{line}<title>{title}</title></line>"


def _pieces(steps: list[float], values: list[float | None], place: Any) -> list[str]:
    """Point lists without the gaps; a lone point becomes a short dash."""
    pieces: list[list[str]] = [[]]
    for step, value in zip(steps, values, strict=True):
        if value is None:
            pieces.append([])
            continue
        x, y = place(step, value)
        pieces[-1].append(f"{x:.1f},{y:.1f}")
    return [" ".join(piece if len(piece) > 1 else [piece[0], piece[0]]) for piece in pieces if piece]
