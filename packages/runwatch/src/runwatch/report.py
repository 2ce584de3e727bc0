"""The final report of one or more runs: `report.json`, `report.md`, `report.html`."""

from __future__ import annotations

import datetime
import html
import json
import os
from pathlib import Path
from typing import Any

from runwatch import words
from runwatch.errors import UserError
from runwatch.style import STYLE
from runwatch.svg import curve_svg

SHARE_COLORS = {
    "useful": "#2a9d6f", "data": "#d0683a", "start": "#8a94a0", "compile": "#a45cc4", "evaluation": "#2468b8",
    "checkpoint": "#1f9c9c", "recovery": "#b3261e", "other": "#b9a13a",
}  # fmt: skip
_NAMES = {
    "fine": "The run is fine.", "warning": "The run has warnings.", "failing": "The run is failing.",
    "cannot judge": "The run cannot be judged: no loss was read.", "waiting": "Nothing was read.",
}  # fmt: skip


def write_report(state: dict[str, Any], folder: Path) -> list[Path]:
    """Write the three forms; `state` must hold the curves."""
    texts = {
        "report.json": json.dumps(state, ensure_ascii=False, allow_nan=False, indent=1) + "\n",
        "report.md": markdown(state),
        "report.html": page(state),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            _replace_file(folder / name, text)
    except OSError as error:
        raise UserError(f"--report {folder}: {error.strerror}; choose a folder you may write to") from error
    return [folder / name for name in texts]


def _replace_file(path: Path, text: str) -> None:
    """A reader sees the old content or the new one, never a part."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text, encoding="utf-8", errors="replace")
    os.replace(staged, path)


def markdown(state: dict[str, Any]) -> str:
    """For people who read in terminals and pull requests."""
    return "\n".join(["# Training report", "", *(_markdown_run(run) for run in state["runs"])])


def _markdown_run(run: dict[str, Any]) -> str:
    lines = [
        f"## {run['name']}",
        "",
        f"{_NAMES[run['health']]} State: {run['state']}, {words.progress(run)}.",
        "",
    ]
    lines += ["| value | last |", "|---|---|"]
    lines += [f"| {label} | {value} |" for label, value in _values(run)]
    lines += ["", "### Findings", ""]
    for alert in words.ordered(run["alerts"]):
        over = " (resolved)" if alert["status"] == "resolved" else ""
        lines.append(
            f"- **{alert['level']} {alert['code']} {alert['name']}**{over}, {words.since(alert)}: {alert['evidence']}"
        )
        lines.append(f"  - What to do: {alert['advice']}")
    lines += [] if run["alerts"] else ["Nothing was found."]
    if run["goodput"]:
        lines += ["", "### Where the time went", "", "| cause | time | share |", "|---|---|---|"]
        lines += [f"| {cause} | {time} | {share} |" for cause, time, share in _shares(run["goodput"])]
    lines += ["", "### Timeline", ""]
    lines += [f"- {at}: {what}" for at, what in _timeline(run)] or ["Nothing is known."]
    return "\n".join([*lines, ""])


def _values(run: dict[str, Any]) -> list[tuple[str, str]]:
    values = run["values"]
    return [
        (label, words.number(key, values[key], run["rate_kind"]))
        for key, label in words.LABELS.items()
        if key in values
    ]


def _shares(goodput: dict[str, Any]) -> list[tuple[str, str, str]]:
    seconds = goodput["seconds"]
    shown = [cause for cause in seconds if seconds[cause] > 0]
    return [
        (cause, words.duration(seconds[cause]), f"{100 * goodput['shares'][cause]:.1f} %") for cause in shown
    ]


def _timeline(run: dict[str, Any]) -> list[tuple[str, str]]:
    entries = []
    for entry in run.get("timeline", []):
        stamp = entry["time"]
        when = datetime.datetime.fromtimestamp(stamp).strftime("%Y-%m-%d %H:%M:%S") if stamp else ""
        where = f"step {entry['step']}" if entry["step"] is not None else ""
        entries.append((", ".join(part for part in (when, where) if part) or "unknown time", entry["what"]))
    return entries


def page(state: dict[str, Any]) -> str:
    """One HTML file without anything from outside."""
    runs = "".join(_html_run(run) for run in state["runs"])
    stamp = datetime.datetime.fromtimestamp(state["time"] or 0).strftime("%Y-%m-%d %H:%M")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Training report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main><header><h1>Training report</h1>"
        f'<span class="soft">{stamp}</span></header><div class="runs">{runs}</div></main></body></html>\n'
    )


def _html_run(run: dict[str, Any]) -> str:
    escape = html.escape
    head = f'<h2>{escape(run["name"])}</h2><p><span class="badge {_css(run)}">{_NAMES[run["health"]]}</span> '
    head += f"{escape(run['state'])}, {escape(words.progress(run))}</p>"
    values = "".join(
        f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in _values(run)
    )
    alerts = "".join(map(_html_alert, words.ordered(run["alerts"]))) or "<p>Nothing was found.</p>"
    parts = [
        head,
        f"<dl>{values}</dl>",
        "<h3>Findings</h3>",
        alerts,
        _html_goodput(run["goodput"]),
        _html_plots(run),
    ]
    rows = "".join(f"<tr><td>{escape(at)}</td><td>{escape(what)}</td></tr>" for at, what in _timeline(run))
    parts += ["<h3>Timeline</h3>", f'<div class="scroll"><table>{rows}</table></div>', _html_samples(run)]
    return f'<section class="run {_css(run)}">{"".join(parts)}</section>'


def _css(run: dict[str, Any]) -> str:
    return str(run["health"]).replace(" ", "-")


def _html_alert(alert: dict[str, Any]) -> str:
    name = f"{alert['level']} {alert['code']} {alert['name']}"
    over = " (resolved)" if alert["status"] == "resolved" else ""
    return (
        f'<div class="alert {alert["level"]} {alert["status"]}"><p><b>{html.escape(name)}</b>{over} '
        f'<span class="soft">{html.escape(words.since(alert))}</span></p><p>{html.escape(alert["evidence"])}</p>'
        f'<p class="soft">{html.escape(alert["advice"])}</p></div>'
    )


def _html_goodput(goodput: dict[str, Any] | None) -> str:
    if not goodput:
        return ""
    shares = goodput["shares"]
    stripe = "".join(
        f'<i style="width:{100 * share:.2f}%;background:{SHARE_COLORS[cause]}" title="{cause}"></i>'
        for cause, share in shares.items()
    )
    rows = "".join(
        f'<tr><td><span style="color:{SHARE_COLORS[cause]}">■</span> {cause}</td><td>{time}</td><td>{share}</td></tr>'
        for cause, time, share in _shares(goodput)
    )
    title = f"<h3>Goodput {100 * goodput['goodput']:.1f} % of {words.duration(goodput['wall_seconds'])}</h3>"
    return f'{title}<div class="shares">{stripe}</div><table>{rows}</table>'


def _html_plots(run: dict[str, Any]) -> str:
    figures = []
    for name, curve in run.get("curves", {}).items():
        drawn = curve_svg(name, [curve], run["alerts"], run["rate_kind"])
        if drawn:
            figures.append(
                f"<figure><figcaption>{html.escape(words.LABELS.get(name, name))}</figcaption>{drawn}</figure>"
            )
    return f'<h3>Curves</h3><div class="plots">{"".join(figures)}</div>' if figures else ""


def _html_samples(run: dict[str, Any]) -> str:
    if not run["samples"]:
        return ""
    rows = "".join(
        f'<div class="sample"><span class="soft">original</span> {html.escape(str(item.get("original", "")))}<br>'
        f'<span class="soft">decoded</span> {html.escape(str(item.get("decoded", "")))}</div>'
        for item in run["samples"]["samples"]
        if isinstance(item, dict)
    )
    return f"<h3>Decoded at step {html.escape(str(run['samples']['step']))}</h3>{rows}"
