"""Numbers and states in words, the same on the screen, in plain text and in reports."""

from __future__ import annotations

import os
import shutil
import textwrap
from typing import Any

from runwatch.catalogue import LEVELS
from runwatch.tokens import clean

LABELS = {
    "loss": "loss", "text_loss": "text", "latent_loss": "latent", "text_accuracy": "accuracy",
    "valid_loss": "validation", "lr": "lr", "grad_norm": "grad norm", "rate": "rate", "mfu": "MFU",
    "gpu_busy": "GPU busy",
    "gpu_memory_allocated": "memory", "data_wait": "data wait", "disk_free": "disk free",
}  # fmt: skip
UNITS = {
    "tokens_per_second": "tokens/s",
    "documents_per_second": "documents/s",
    "steps_per_second": "steps/s",
    "epochs_per_second": "epochs/s",
}
_SHARES = ("text_accuracy", "mfu", "gpu_busy", "data_wait")
_BYTES = ("gpu_memory_allocated", "gpu_memory_reserved", "disk_free")


def number(name: str, value: Any, rate_kind: str | None = None) -> str:
    """A value with its unit."""
    if not isinstance(value, int | float):
        return str(value)
    if name in _SHARES:
        return f"{100 * value:.1f} %"
    if name in _BYTES:
        return f"{value / 2**30:.1f} GiB"
    if name == "rate":
        return (
            f"{value:,.4g} {UNITS.get(rate_kind or '', '')}"
            if value < 1000
            else f"{value:,.0f} {UNITS.get(rate_kind or '', '')}"
        )
    return f"{value:.3g}" if name == "lr" else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Roughly how long, for people."""
    if seconds is None:
        return "?"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:.1f} days"


def progress(run: dict[str, Any]) -> str:
    """Where a run is."""
    if run["step"] is None:
        return "no step yet"
    total = run["total_steps"]
    kind = "epoch" if run.get("counts") == "epochs" else "step"
    where = f"{kind} {run['step']:,}" + (
        f" of {total:,} ({100 * run['step'] / total:.0f} %)" if total else ""
    )
    left = f", about {duration(run['left_seconds'])} left" if run["left_seconds"] is not None else ""
    return where + left


def since(alert: dict[str, Any]) -> str:
    """First and last step of an alert, and how often."""
    first, last = alert["first_step"], alert["last_step"]
    steps = "" if first is None else f"step {first}"
    if first is not None and last not in (None, first):
        steps = f"steps {first} to {last}"
    times = f"{alert['count']} times" if alert["count"] > 1 else ""
    return ", ".join(part for part in (steps, times, f"{100 * alert['sure']:.0f} % sure") if part)


def plain_text(state: dict[str, Any]) -> str:
    """The whole state without colour or boxes, for pipes and files."""
    lines = [_plain_run(run) for run in state["runs"]]
    if left_out := state.get("without_loss"):
        names = ", ".join(os.path.basename(path) for path in left_out[:8])
        rest = f" and {len(left_out) - 8} more" if len(left_out) > 8 else ""
        lines.append(f"no loss in {len(left_out)} other files of this folder: {names}{rest}")
    return "\n".join(lines)


def _width() -> int:
    """Of the text: that of the terminal, at most 118 columns, also where there is none."""
    return min(118, max(40, shutil.get_terminal_size((120, 24)).columns - 2))


def _plain_run(run: dict[str, Any]) -> str:
    lines = [f"{run['name']}: {run['health']}, {run['state']}, {progress(run)}"]
    values = run["values"]
    shown = [f"{LABELS[key]} {value_with_age(run, key)}" for key in LABELS if key in values]
    lines += textwrap.wrap(" | ".join(shown), _width(), initial_indent="  ", subsequent_indent="  ")
    for alert in ordered(run["alerts"]):
        lines += _plain_alert(alert)
    if run["health"] == "cannot judge":
        lines += unread_lines(run)
    elif not run["alerts"]:
        lines.append(f"  {no_alert(run)}")
    return "\n".join(lines)


def no_alert(run: dict[str, Any]) -> str:
    """What stands in the place of alerts where there are none."""
    if run["num_losses"]:
        return "nothing found"
    if os.path.exists(run["path"]):
        return "waiting for the first line"
    return f"waiting for {run['path']}, which does not exist yet"


def value_with_age(run: dict[str, Any], key: str) -> str:
    """A value, and how old it is where it is old."""
    text, steps = number(key, run["values"][key], run["rate_kind"]), run.get("behind", {}).get(key)
    return f"{text} ({steps:,} step{'' if steps == 1 else 's'} ago)" if steps else text


def unread_lines(run: dict[str, Any]) -> list[str]:
    """Why a log cannot be judged, and how to name its numbers."""
    unread = run.get("unread") or {"names": [], "lines": []}
    if run.get("is_empty"):
        return ["  the file is empty"]
    if not unread["lines"]:
        return ["  no loss was read, and no line has a number with a name"]
    lines = ["  no loss was read; these lines look like numbers:"]
    lines += [f"    {line[:110]}" for line in unread["lines"][:3]]
    names = ", ".join(unread["names"][:8])
    return [*lines, f"  name the loss and the step: --map loss=NAME --map step=NAME (names read: {names})"]


def ordered(alerts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Open ones first, the worst of them on top."""
    return sorted(alerts, key=lambda alert: (alert["status"] != "open", -LEVELS.index(alert["level"])))


def _plain_alert(alert: dict[str, Any]) -> list[str]:
    is_open = alert["status"] == "open"
    name = f"{alert['level'].upper()} {alert['code']} {alert['name']}{'' if is_open else ' (resolved)'}"
    advice = textwrap.wrap(
        alert["advice"], min(112, _width()), initial_indent="     -> ", subsequent_indent="        "
    )
    return [f"  {name}: {alert['evidence']} [{since(alert)}]", *(advice if is_open else [])]


def change_line(name: str, what: str, alert: dict[str, Any]) -> str:
    """One line of news, for a terminal that is piped, a log or a chat."""
    head = f"{name}: {what} {alert['level'].upper()} {alert['code']} {alert['name']}"
    return clean(f"{head}: {alert['evidence']} [{since(alert)}]")


def status_line(run: dict[str, Any]) -> str:
    """Where a run is and its main numbers, in one line."""
    shown = [f"{LABELS[key]} {value_with_age(run, key)}" for key in ("loss", "rate") if key in run["values"]]
    return ", ".join([f"{run['name']}: {run['health']}", run["state"], progress(run), *shown])
