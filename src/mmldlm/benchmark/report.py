"""What a benchmark leaves in its folder: result.json, table.md, report.html, chart.png, and logs/.

`result.json` is there after the first process has ended, marked partial until the last one has, so that nothing
measured is lost however the benchmark ends.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mmldlm.benchmark import chart
from mmldlm.benchmark.comparison import REFERENCE, Comparison, Outcome, Row
from mmldlm.benchmark.machine import summary_lines
from mmldlm.benchmark.measuring import Bench
from mmldlm.benchmark.search import Search, Sweep
from mmldlm.durable import replace_file
from mmldlm.reports import Picture, Table, markdown_rows, render_page

_LONG = ("change", "set-up s", "documents/s", "data wait", "fill", "warm-up s")
Cell = Callable[[Row], str]


def compact(table: Table) -> Table:
    """Without what a terminal has no room for."""
    kept = [idx for idx, name in enumerate(table.head) if name not in _LONG]
    rows = [[row[idx] for idx in kept] for row in table.rows]
    return replace(table, head=[table.head[idx] for idx in kept], rows=rows)


def _rate(row: Row) -> str:
    figure = row.tokens_per_second
    return f"{figure.median:,.0f} ({figure.low:,.0f} to {figure.high:,.0f})" if figure else ""


def _speedup(row: Row) -> str:
    figure = row.speedup
    return f"{figure.value:.2f} ({figure.low:.2f} to {figure.high:.2f})" if figure else ""


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
    return Table("Arms", "", ["arm", "change", *columns, "verdict"], cells)


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
    return Table(
        f"Sweep of {sweep.key}", "", [sweep.key, *columns, "time x", "memory x", "work x", "remark"], cells
    )


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
    return Table("Batches", "", ["tokens per step", *columns, "remark"], cells)


FORMAT = 1
Result = Comparison | Sweep | Search


@dataclass
class Report:
    """One benchmark on its way into a folder."""

    folder: Path
    bench: Bench
    environment: dict[str, Any]
    data: dict[str, Any]
    """Where the documents come from."""
    notes: list[str] = field(default_factory=list)
    """What a reader must know, such as arms that were left out."""

    def write_trials(self) -> None:
        """What is known while the measuring goes on."""
        self._write_json({"kind": "trials", "partial": True})

    def write(self, result: Result, outcomes: list[Outcome]) -> Table:
        """The whole report; returns the table for the terminal."""
        table = _table(result)
        self._write_json(_values(result) | {"conditions": [asdict(outcome) for outcome in outcomes]})
        lines = [
            *self._head(result),
            *markdown_rows(table.head, table.rows),
            "",
            *self._foot(result, outcomes),
        ]
        replace_file(self.folder / "table.md", ("\n".join(lines) + "\n").encode())
        picture = _draw(result)
        replace_file(self.folder / "chart.png", picture.png)
        page = render_page(
            "Benchmark",
            intro=[*(["Partial: stopped before its end."] if result.partial else []), *self._facts()[-2:]],
            notes=[*self.remarks(result), *(outcome.line() for outcome in outcomes)],
            pictures=[picture],
            tables=[table],
            details={"Machine": dict(line.split(": ", 1) for line in summary_lines(self.environment))},
        )
        replace_file(self.folder / "report.html", page)
        return table

    def _write_json(self, values: dict[str, Any]) -> None:
        whole = {
            "format": FORMAT,
            **values,
            "environment": self.environment,
            "options": self.bench.options.to_json(),
            "data": self.data,
            "notes": self.notes,
            "trials": [trial.to_json() for trial in self.bench.trials],
        }
        text = json.dumps(whole, indent=1, allow_nan=False)
        replace_file(self.folder / "result.json", text.encode())

    def _head(self, result: Result) -> list[str]:
        partial = ["**Partial: the benchmark was stopped before its end.**", ""] if result.partial else []
        return ["# Benchmark", "", *partial, *(f"- {line}" for line in self._facts()), ""]

    def _facts(self) -> list[str]:
        return [*summary_lines(self.environment), f"data: {describe_data(self.data)}", self._method()]

    def _method(self) -> str:
        options = self.bench.options
        devices = sorted({trial.measurement.device for trial in self.bench.trials if trial.measurement})
        where = f" on {', '.join(devices)}" if devices else ""
        return (
            f"method: a fresh process for each of {options.repeats} interleaved repeats{where}, "
            f"{options.warmup} steps of warm-up, {options.steps} timed steps in blocks of {options.block}"
        )

    def _foot(self, result: Result, outcomes: list[Outcome]) -> list[str]:
        lines = [*self.remarks(result), *(outcome.line() for outcome in outcomes)]
        return [*(f"- {line}" for line in lines), "", "![Chart of the table above](chart.png)"]

    def remarks(self, result: Result) -> list[str]:
        """What stands below the table, for people."""
        if isinstance(result, Comparison):
            said = [f"{row.name}: {text}" for row in result.rows for text in row.warnings]
            return [*self.notes, *said, *_noise_lines(result), *self._gate_lines()]
        if isinstance(result, Search) and result.stopped_by:
            return [*self.notes, f"the search ended early: {result.stopped_by}"]
        return self.notes

    def _gate_lines(self) -> list[str]:
        options = self.bench.options
        if not options.gate_steps:
            return ["loss gate: off"]
        failed = [t.failure.reason for t in self.bench.trials if t.arm == REFERENCE and t.failure]
        if failed:
            return [f"loss gate: the reference died, so nothing was gated: {failed[0]}"]
        return [
            f"loss gate: mean of |loss - reference| / |reference| over the first {options.gate_steps} steps, and the "
            f"same of the held-out loss after them, each at most {options.tolerance:g}; the reference is the padded, "
            "eager fp32 path"
        ]


def _noise_lines(comparison: Comparison) -> list[str]:
    if comparison.noise is None:
        return ["noise: not known, so every interval is compared with 1"]
    noise = comparison.noise
    return [
        f"noise: {comparison.baseline} against itself gave {noise.value:.3f} (95 % interval {noise.low:.3f} to "
        f"{noise.high:.3f}); an arm is faster or slower only where its whole interval is beyond a factor of "
        f"{noise.margin:.3f}"
    ]


def _values(result: Result) -> dict[str, Any]:
    if isinstance(result, Sweep):
        return {"kind": "sweep", "partial": result.partial, "sweep": result.to_json()}
    if isinstance(result, Search):
        return {"kind": "find-batch", "partial": result.partial, "search": result.to_json()}
    return {
        "kind": "comparison",
        "partial": result.partial,
        "baseline": result.baseline,
        "noise": asdict(result.noise) if result.noise else None,
        "rows": [row.to_json() for row in result.rows],
    }


def _table(result: Result) -> Table:
    if isinstance(result, Sweep):
        return sweep_table(result)
    return search_table(result) if isinstance(result, Search) else comparison_table(result)


def _draw(result: Result) -> Picture:
    if isinstance(result, Sweep):
        return chart.draw_sweep(result)
    return chart.draw_search(result) if isinstance(result, Search) else chart.draw_comparison(result)


def describe_data(data: dict[str, Any]) -> str:
    """One line about the documents."""
    synthetic = data["synthetic"]
    source = f"synthetic (seed {synthetic['seed']})" if synthetic else data["store"]
    return (
        f"{source}, {data['documents']:,} documents, {data['mean_length']:.1f} tokens on average, at most "
        f"{data['max_length']:,}, vocabulary {data['vocabulary']:,}, latents {data['slots']} x {data['channels']}"
    )
