"""The state of the runs as plain data: the JSON twin of the screen, and what the page and the report are made of."""

from __future__ import annotations

import math
from typing import Any

from runwatch.records import SHOWN
from runwatch.watch import RunWatch

HEALTH = {"error": "ill", "warn": "unwell", "info": "fine", None: "fine"}


def health_of(run: RunWatch) -> str:
    """fine, unwell or ill by the open alerts; unknown while nothing has been read."""
    if not run.num_lines and not run.panel.book.alerts:
        return "unknown"
    return HEALTH[run.panel.book.worst(only_open=True)]


def run_state(run: RunWatch, *, curves: bool = False) -> dict[str, Any]:
    """Everything about one run."""
    now, total, pace = run.clock(), run.facts.total_steps, run.steps_per_second()
    ended = run.state() != "running"
    left = (total - run.step) / pace if total and run.step is not None and pace and not ended else None
    state: dict[str, Any] = {
        "name": run.source.name,
        "path": str(run.source.path),
        "health": health_of(run),
        "state": run.state(),
        "step": run.step,
        "total_steps": total,
        "num_lines": run.num_lines,
        "num_ranks": len(run.ranks) or None,
        "last_line_seconds": round(now - run.line_time, 1) if run.line_time is not None else None,
        "left_seconds": round(left) if left else None,
        "rate_kind": run.rate_kind or None,
        "values": {name: plain(run.latest[name]) for name in SHOWN if name in run.latest},
        "buckets": {name: [plain(value) for value in values] for name, values in run.buckets.items()},
        "alerts": [_alert(item) for item in run.panel.book.alerts.values()],
        "goodput": run.ledger.summary(),
        "samples": run.samples,
    }
    if curves:
        state["curves"] = {
            name: _points(curve.points()) for name, curve in run.curves.items() if curve.points()[0]
        }
        state["timeline"] = sorted(run.timeline, key=lambda entry: entry["time"] or 0.0)
    return state


def whole_state(runs: list[RunWatch], *, curves: bool = False) -> dict[str, Any]:
    """All runs, and the worst health among them."""
    order = ("unknown", "fine", "unwell", "ill")
    states = [run_state(run, curves=curves) for run in runs]
    worst = max((state["health"] for state in states), key=order.index, default="unknown")
    return {"health": worst, "time": round(runs[0].clock(), 3) if runs else None, "runs": states}


def plain(value: float) -> float | str | None:
    """A number that strict JSON knows; one that is not finite becomes its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _alert(alert: Any) -> dict[str, Any]:
    return {
        key: plain(value) if isinstance(value, float) else value for key, value in alert.as_dict().items()
    }


def _points(points: tuple[list[float], list[float]]) -> dict[str, list[float | None]]:
    steps, values = points
    return {"steps": list(steps), "values": [value if math.isfinite(value) else None for value in values]}
