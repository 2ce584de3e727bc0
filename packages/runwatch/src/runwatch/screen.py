"""The live screen: one panel a run, side by side where there is room."""

from __future__ import annotations

from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runwatch import words
from runwatch.chart import bars, braille, value_range

COLORS = {
    "fine": "green", "warning": "yellow", "failing": "red", "cannot judge": "magenta", "waiting": "bright_black",
}  # fmt: skip
LEVEL_COLORS = {"error": "bold red", "warn": "yellow", "info": "cyan"}
_CHARTS = ("loss", "rate", "valid_loss", "grad_norm", "lr", "gpu_memory_allocated", "data_wait")
_VALUES = (
    "loss", "text_loss", "latent_loss", "valid_loss", "text_accuracy", "rate", "grad_norm", "lr", "mfu", "gpu_busy",
    "gpu_memory_allocated", "data_wait", "disk_free",
)  # fmt: skip


def render(state: dict[str, Any], width: int, height: int) -> RenderableType:
    """The whole screen."""
    runs = state["runs"]
    across = max(1, min(len(runs), width // 64))
    each = width // across
    rows = -(-len(runs) // across)
    panels = [run_panel(run, each, max(14, height // rows - 1)) for run in runs]
    return Columns(panels, width=each, padding=(0, 0)) if across > 1 else Group(*panels)


def run_panel(run: dict[str, Any], width: int, height: int) -> Panel:
    """One run: where it is, what is wrong, its numbers, its curves."""
    color, inner = COLORS[run["health"]], width - 4
    alerts = _alerts(run, most=max(2, height // 8))
    numbers, buckets = _values(run, inner), _buckets(run)
    used = 4 + numbers.row_count + len(buckets) + sum(_height(text, inner - 6) for text in alerts)
    parts: list[RenderableType] = [_headline(run, color), _bar(run, inner), *alerts, numbers, *buckets]
    parts += _charts(run, inner, height - used)
    silent = run["last_line_seconds"]
    note = f"last line {words.duration(silent)} ago" if silent is not None else None
    return Panel(
        Group(*parts), title=f"[bold]{run['name']}[/bold]", subtitle=note, border_style=color, width=width
    )


def _height(text: Text, width: int) -> int:
    return sum(-(-max(1, len(line)) // width) for line in text.plain.split("\n"))


def _headline(run: dict[str, Any], color: str) -> Text:
    health = (f"● {run['health']}", f"bold {color}")
    return Text.assemble(
        health, f"  {run['state']}, ", words.progress(run), no_wrap=True, overflow="ellipsis"
    )


def _bar(run: dict[str, Any], width: int) -> RenderableType:
    if not run["total_steps"]:
        return Text("")
    row = Table.grid()
    row.add_row(ProgressBar(total=run["total_steps"], completed=run["step"] or 0, width=min(width, 80)))
    return row


def _buckets(run: dict[str, Any]) -> list[Text]:
    rows = []
    for name, losses in run["buckets"].items():
        span = value_range([value if isinstance(value, int | float) else None for value in losses])
        limits = f"{span[0]:.3g} … {span[1]:.3g}" if span else "no values"
        label = name.removesuffix("_by_time").replace("_", " ")
        rows.append(Text.assemble((f"{label} by time ", "bright_black"), bars(losses), f"  {limits}"))
    return rows


def _values(run: dict[str, Any], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    values, across = run["values"], max(1, width // 23)
    names = [name for name in _VALUES if name in values]
    cells = [
        Text.assemble((f"{words.LABELS[name]} ", "bright_black"), words.value_with_age(run, name))
        for name in names
    ]
    for start in range(0, len(cells), across):
        table.add_row(*cells[start : start + across])
    return table


def _charts(run: dict[str, Any], width: int, room: int) -> list[RenderableType]:
    """As many curves as there is room for, two beside each other."""
    names = [name for name in _CHARTS if len(run.get("curves", {}).get(name, {}).get("steps", ())) > 1]
    per_row, lines = (2, 3) if width >= 80 else (1, 3)
    names = names[: max(0, room // (lines + 1)) * per_row]
    each = width // per_row - 2
    rows: list[RenderableType] = []
    for start in range(0, len(names), per_row):
        table = Table.grid(padding=(0, 2))
        table.add_row(*(_chart(run, name, each, lines) for name in names[start : start + per_row]))
        rows.append(table)
    return rows


def _chart(run: dict[str, Any], name: str, width: int, lines: int) -> Text:
    curve = run["curves"][name]
    span = value_range(curve["values"])
    low, high = (words.number(name, value, run["rate_kind"]) for value in span) if span else ("?", "?")
    text = Text(f"{words.LABELS[name]}  {low} … {high}\n", style="bright_black")
    text.append("\n".join(braille(curve["steps"], curve["values"], max(10, width), lines)), style="cyan")
    return text


def _alerts(run: dict[str, Any], most: int) -> list[Text]:
    alerts = words.ordered(run["alerts"])
    if run["health"] == "cannot judge":
        return [Text(line.strip(), style="magenta", overflow="fold") for line in words.unread_lines(run)]
    if not alerts:
        return [Text(words.no_alert(run), style="green" if run["num_losses"] else "", overflow="fold")]
    texts = []
    for alert in alerts[:most]:
        is_open = alert["status"] == "open"
        text = Text(overflow="fold")
        text.append(
            f"{'▲' if is_open else '✓'} {alert['level']} {alert['code']} {alert['name']}", style=_style(alert)
        )
        text.append(f"  {alert['evidence']}  [{words.since(alert)}]", style="" if is_open else "bright_black")
        if is_open:
            text.append(f"\n  → {alert['advice']}", style="bright_black")
        texts.append(text)
    if len(alerts) > most:
        texts.append(Text(f"and {len(alerts) - most} more", style="bright_black"))
    return texts


def _style(alert: dict[str, Any]) -> str:
    return LEVEL_COLORS[alert["level"]] if alert["status"] == "open" else "bright_black"
