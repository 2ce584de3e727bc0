"""The result as tables of plain cells, which become Markdown in a file and a table in the terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mmldlm.benchmark.find_batch import Search
from mmldlm.benchmark.ladder import Comparison, Row
from mmldlm.benchmark.sweep import Sweep

_LONG = ("change", "set-up s", "documents/s", "data wait", "fill", "warm-up s")
Cell = Callable[[Row], str]


@dataclass(frozen=True)
class Table:
    """Headers and rows of text; the first column is to the left, figures to the right."""

    headers: list[str]
    rows: list[list[str]]

    def compact(self) -> Table:
        """Without what a terminal has no room for."""
        kept = [idx for idx, header in enumerate(self.headers) if header not in _LONG]
        return Table([self.headers[idx] for idx in kept], [[row[idx] for idx in kept] for row in self.rows])

    def markdown(self) -> str:
        """GitHub's pipes."""
        rules = ["---", *("---:" for _ in self.headers[1:])]
        lines = [self.headers, rules, *self.rows]
        return "\n".join(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
        )


def _rate(row: Row) -> str:
    found = row.tokens_per_second
    return f"{found.median:,.0f} ({found.low:,.0f} to {found.high:,.0f})" if found else ""


def _speedup(row: Row) -> str:
    found = row.speedup
    return f"{found.value:.2f} ({found.low:.2f} to {found.high:.2f})" if found else ""


def _loss(row: Row) -> str:
    return row.gate if row.loss_difference is None else f"{row.gate} ({row.loss_difference:.1e})"


def _valid(row: Row) -> str:
    if row.valid_loss is None or row.valid_difference is None:
        return ""
    return f"{row.valid_loss:.4f} ({row.valid_difference:.1e})"


def gib(count: int | None) -> str:
    """Bytes for people."""
    return "" if count is None else f"{count / 2**30:.2f}"


def share(value: float | None) -> str:
    """A share for people."""
    return "" if value is None else f"{100 * value:.1f} %"


def seconds(value: float | None) -> str:
    """A duration for people."""
    return "" if value is None else f"{value:.4g}"


COLUMNS: dict[str, Cell] = {
    "tokens/s (quartiles)": _rate,
    "documents/s": lambda row: f"{row.documents_per_second:,.1f}" if row.documents_per_second else "",
    "s/step": lambda row: seconds(row.seconds_per_step),
    "speed-up (95 %)": _speedup,
    "peak GiB": lambda row: gib(row.memory),
    "host GiB": lambda row: gib(row.resident) if row.resident != row.memory else "",
    "set-up s": lambda row: seconds(row.set_up_seconds),
    "MFU": lambda row: share(row.mfu),
    "data wait": lambda row: share(row.data_wait),
    "fill": lambda row: share(row.fill),
    "warm-up s": lambda row: f"{row.warmup_seconds:.1f}" if row.warmup_seconds is not None else "",
    "valid loss": _valid,
    "loss gate": _loss,
}


def _filled(names: list[str], rows: list[Row]) -> list[str]:
    """Columns that say something about some row."""
    return [name for name in names if any(COLUMNS[name](row) for row in rows)]


def comparison_table(comparison: Comparison) -> Table:
    """A row for each arm."""
    rows = comparison.rows
    columns = _filled([name for name in COLUMNS if name not in ("host GiB", "set-up s")], rows)
    cells = [
        [row.name, row.change, *(COLUMNS[name](row) for name in columns), row.failure or row.verdict]
        for row in rows
    ]
    return Table(["arm", "change", *columns, "verdict"], cells)


def sweep_table(sweep: Sweep) -> Table:
    """A row for each value, with the growth of time, memory and work since the first."""
    rows = [point.row for point in sweep.points]
    columns = _filled(
        ["tokens/s (quartiles)", "documents/s", "s/step", "peak GiB", "host GiB", "set-up s", "MFU"], rows
    )
    growth = [sweep.growth(what) for what in ("seconds_per_step", "memory", "flops_per_step")]
    cells = [
        [
            point.value,
            *(COLUMNS[name](point.row) for name in columns),
            *(f"{value[idx]:.2f}" if value[idx] is not None else "" for value in growth),
            point.row.failure or "",
        ]
        for idx, point in enumerate(sweep.points)
    ]
    return Table([sweep.key, *columns, "time x", "memory x", "work x", "remark"], cells)


def search_table(search: Search) -> Table:
    """A row for each batch size that was tried."""
    columns = _filled(
        ["tokens/s (quartiles)", "documents/s", "s/step", "peak GiB", "MFU"],
        [one.row for one in search.tries],
    )
    marks = {id(search.fastest): "fastest", id(search.largest): "largest that fits"}
    if search.fastest is search.largest and search.largest is not None:
        marks = {id(search.largest): "largest that fits, fastest"}
    cells = [
        [
            f"{one.tokens:,}",
            *(COLUMNS[name](one.row) for name in columns),
            one.row.failure or marks.get(id(one), ""),
        ]
        for one in search.tries
    ]
    return Table(["tokens per step", *columns, "remark"], cells)
