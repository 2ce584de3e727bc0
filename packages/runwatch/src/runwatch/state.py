"""The state of the runs as plain data: the JSON twin of the screen, and what the page and the report are made of."""

from __future__ import annotations

import math
from typing import Any

from runwatch.judged import JudgedRun
from runwatch.records import SHOWN
from runwatch.tokens import clean
from runwatch.watch import RunWatch

HEALTH = {"error": "failing", "warn": "warning"}
ORDER = ("waiting", "fine", "warning", "cannot judge", "failing")
"""From good to bad; waiting is a log that has not begun."""
_STALE_SHARE = 0.02


def health_of(watch: RunWatch, run: JudgedRun) -> str:
    """By the open alerts; a log without a loss is never fine."""
    worst = run.panel.book.worst(only_open=True)
    if worst == "error":
        return "failing"
    if not run.num_losses:
        return "waiting" if watch.is_waiting() else "cannot judge"
    return HEALTH.get(worst or "", "fine")


def run_states(watch: RunWatch, *, curves: bool = False) -> list[dict[str, Any]]:
    """Everything about the runs of one source."""
    runs, name = watch.runs(), watch.source.name
    if len(runs) == 1:
        return [run_state(watch, curves=curves)]
    names = [f"{name} (run {number} of {len(runs)})" for number in range(1, len(runs) + 1)]
    return [run_state(watch, run, name, curves=curves) for run, name in zip(runs, names, strict=True)]


def run_state(
    watch: RunWatch, run: JudgedRun | None = None, name: str = "", *, curves: bool = False
) -> dict[str, Any]:
    """Everything about one run."""
    run = run or watch.current
    now, total, pace, what = watch.clock(), run.facts.total_steps, run.steps_per_second(), watch.state(run)
    last_at = watch.last_line_at(run)
    left = (
        (total - run.step) / pace if total and run.step is not None and pace and what == "running" else None
    )
    state: dict[str, Any] = {
        "name": name or watch.source.name,
        "path": str(watch.source.path),
        "health": health_of(watch, run),
        "state": what,
        "step": run.step,
        "total_steps": total,
        "counts": "epochs" if run.by_epoch else "steps",
        "num_lines": run.num_lines,
        "num_losses": run.num_losses,
        "num_ranks": len(run.ranks) or None,
        "last_line_seconds": round(now - last_at, 1) if last_at is not None else None,
        "left_seconds": round(left) if left and left > 0 else None,
        "rate_kind": _rate_kind(run),
        "values": {name: plain(run.latest[name]) for name in SHOWN if name in run.latest},
        "behind": _behind(run),
        "buckets": {name: [plain(value) for value in values] for name, values in run.buckets.items()},
        "alerts": [_alert(item) for item in run.panel.book.alerts.values()],
        "goodput": run.ledger.summary(),
        "samples": run.samples,
    }
    if state["health"] == "cannot judge":
        names, lines = watch.unread()
        state["unread"] = {"names": names, "lines": lines}
        state["is_empty"] = not watch.has_text()
    if curves:
        state["curves"] = {
            name: _points(curve.points()) for name, curve in run.curves.items() if curve.points()[0]
        }
        state["timeline"] = sorted(run.timeline, key=lambda entry: entry["time"] or 0.0)
    return state


def _rate_kind(run: JudgedRun) -> str | None:
    if run.by_epoch and run.rate_kind == "steps_per_second":
        return "epochs_per_second"
    return run.rate_kind or None


def _behind(run: JudgedRun) -> dict[str, int]:
    """How many steps old a value is, where it is old."""
    step = run.step or 0
    least = max(10, _STALE_SHARE * step)
    return {name: step - at for name, at in run.latest_at.items() if step - at > least and name in run.latest}


def whole_state(watches: list[RunWatch], *, curves: bool = False) -> dict[str, Any]:
    """All runs, and the worst health among them."""
    states = [_cleaned(state) for watch in watches for state in run_states(watch, curves=curves)]
    worst = max((state["health"] for state in states), key=ORDER.index, default="waiting")
    return {"health": worst, "time": round(watches[0].clock(), 3) if watches else None, "runs": states}


def _cleaned(value: Any) -> Any:
    """The same without control sequences in texts: JSON can spell them in ways that no line shows."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, list):
        return [_cleaned(item) for item in value] if not value or not isinstance(value[0], float) else value
    return {clean(key): _cleaned(item) for key, item in value.items()} if isinstance(value, dict) else value


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
