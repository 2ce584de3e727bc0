"""What a benchmark leaves in its folder: result.json, table.md, report.html, chart.png, and logs/.

Bars for arms, lines for sweeps and for the search of a batch.

`result.json` is there after the first process has ended, marked partial until the last one has, so that nothing
measured is lost however the benchmark ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.benchmark.comparison import FASTER, REFERENCE, SAME, SLOWER, Comparison, Outcome, Row
from mmldlm.benchmark.machine import machine_facts, summary_lines
from mmldlm.benchmark.measuring import Bench, Measurement
from mmldlm.benchmark.search import Search, Sweep, draw_search, draw_sweep
from mmldlm.durable import replace_file
from mmldlm.json_lines import encode
from mmldlm.reports import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    Picture,
    Table,
    explain_colours,
    make_figure,
    markdown_rows,
    render_page,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LONG = ("change", "set-up s", "documents/s", "data wait", "fill", "warm-up s")
Cell = Callable[[Row], str]


def compact(table: Table) -> Table:
    """Without what a terminal has no room for."""
    kept = [idx for idx, name in enumerate(table.head) if name not in _LONG]
    rows = [[row[idx] for idx in kept] for row in table.rows]
    return replace(table, head=[table.head[idx] for idx in kept], rows=rows)


def _rate(row: Row) -> str:
    rate = row.tokens_per_second
    return f"{rate.median:,.0f} ({rate.low:,.0f} to {rate.high:,.0f})" if rate else ""


def _loss(row: Row) -> str:
    return row.gate if row.loss_difference is None else f"{row.gate} ({row.loss_difference:.1e})"


def _valid(row: Row) -> str:
    if row.valid_loss is None or row.valid_difference is None:
        return ""
    return f"{row.valid_loss:.4f} ({row.valid_difference:.1e})"


def _shown(value: float | None, form: str = "{:.4g}", scale: float = 1.0) -> str:
    return "" if value is None else form.format(scale * value)


def _gib(count: int | None) -> str:
    return _shown(count, "{:.2f}", 2.0**-30)


def _share(value: float | None) -> str:
    return _shown(value, "{:.1f} %", 100.0)


def _planned(row: Row, what: str) -> str:
    return "" if row.expected is None else f"{100 * getattr(row.expected, what):.0f} %"


COLUMNS: dict[str, Cell] = {
    "tokens/s (quartiles)": _rate,
    "documents/s": lambda row: _shown(row.documents_per_second, "{:,.1f}"),
    "s/step": lambda row: _shown(row.seconds_per_step),
    "speed-up (95 %)": lambda row: (
        f"{row.speedup.value:.2f} ({row.speedup.low:.2f} to {row.speedup.high:.2f})" if row.speedup else ""
    ),
    "plan: speed": lambda row: _planned(row, "speed"),
    "peak GiB": lambda row: _gib(row.memory),
    "memory": lambda row: _share(row.memory_share),
    "plan: memory": lambda row: _planned(row, "memory"),
    "host GiB": lambda row: _gib(row.resident) if row.resident != row.memory else "",
    "set-up s": lambda row: _shown(row.set_up_seconds),
    "MFU": lambda row: _share(row.mfu),
    "data wait": lambda row: _share(row.data_wait),
    "fill": lambda row: _share(row.fill),
    "warm-up s": lambda row: _shown(row.warmup_seconds, "{:.1f}"),
    "valid loss": _valid,
    "loss gate": _loss,
}


def _filled(names: list[str], rows: list[Row]) -> list[str]:
    """Columns that say something about some row."""
    return [name for name in names if any(COLUMNS[name](row) for row in rows)]


def comparison_table(comparison: Comparison) -> Table:
    rows = comparison.rows
    unused = ["host GiB", "set-up s", *([] if any(row.expected for row in rows) else ["memory"])]
    columns = _filled([name for name in COLUMNS if name not in unused], rows)
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
            point.row.unmeasured,
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
            one.row.failure or "; ".join(filter(None, [marks.get(id(one)), one.row.doubt])),
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

    def write_trials(self) -> None:
        """What is known while the measuring goes on."""
        self._write_json({"kind": "trials", "partial": True})

    def write(self, result: Result, outcomes: list[Outcome]) -> Table:
        """The whole report; returns the table for the terminal."""
        table = _table(result)
        self._write_json(_values(result) | {"conditions": [asdict(outcome) for outcome in outcomes]})
        remarks = [*self.remarks(result), *(outcome.line() for outcome in outcomes)]
        partial = ["Partial: the benchmark was stopped before its end."] if result.partial else []
        lines = [
            "# Benchmark",
            "",
            *(f"**{line}**\n" for line in partial),
            *(f"- {line}" for line in self._facts()),
        ]
        lines += ["", *markdown_rows(table.head, table.rows), "", *(f"- {line}" for line in remarks)]
        lines += ["", "![Chart of the table above](chart.png)"]
        replace_file(self.folder / "table.md", ("\n".join(lines) + "\n").encode())
        picture = _draw(result)
        replace_file(self.folder / "chart.png", picture.png)
        page = render_page(
            "Benchmark",
            intro=[*partial, *self._facts()[-2:]],
            notes=remarks,
            pictures=[picture],
            tables=[table],
            details={"Machine": machine_facts(self.environment)},
        )
        replace_file(self.folder / "report.html", page)
        return table

    def _write_json(self, values: dict[str, Any]) -> None:
        whole = {
            "format": FORMAT,
            **values,
            "environment": self.environment,
            "options": asdict(self.bench.options),
            "data": self.data,
            "trials": [asdict(trial) for trial in self.bench.trials],
        }
        replace_file(self.folder / "result.json", encode(whole, indent=1))

    def _facts(self) -> list[str]:
        return [*summary_lines(self.environment), f"data: {describe_data(self.data)}", self._method()]

    def _method(self) -> str:
        options = self.bench.options
        devices = sorted({trial.measurement.device for trial in self.bench.trials if trial.measurement})
        where = f" on {', '.join(devices)}" if devices else ""
        return (
            f"method: a fresh process for each of {options.repeats} interleaved repeats{where}, "
            f"{self._warm_up()} steps of warm-up, {options.steps} timed steps in blocks of {options.block}"
        )

    def _warm_up(self) -> str:
        """How many steps it took until the time of a step had settled."""
        return _range([one.warmup_steps for one in self._timed()] or [self.bench.options.warmup], "d")

    def _timed(self) -> list[Measurement]:
        """All measurements but that of the loss reference, which has neither warm-up nor clock."""
        return [one.measurement for one in self.bench.trials if one.measurement and one.measurement.blocks]

    def _warm_up_lines(self) -> list[str]:
        seconds = [one.warmup_seconds for one in self._timed()]
        if not seconds:
            return []
        return [
            f"before the clock: {_range(seconds, '.1f')} s in each process, {self._warm_up()} steps of warm-up"
        ]

    def remarks(self, result: Result) -> list[str]:
        """What stands below the table, for people."""
        if isinstance(result, Comparison):
            warnings = [f"{row.name}: {text}" for row in result.rows for text in row.warnings]
            return [*warnings, *_noise_lines(result), *self._warm_up_lines(), *self._gate_lines()]
        if isinstance(result, Search) and result.stopped_by:
            return [f"the search ended early: {result.stopped_by}", *self._warm_up_lines()]
        return self._warm_up_lines()

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


def _range(values: Sequence[float], form: str) -> str:
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def _noise_lines(comparison: Comparison) -> list[str]:
    base = comparison.row(comparison.baseline)
    if base.unmeasured:
        return [
            f"{base.name}, the baseline, was not measured, so nothing is compared with it: {base.unmeasured}"
        ]
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
        "rows": [asdict(row) for row in result.rows],
    }


def _table(result: Result) -> Table:
    if isinstance(result, Sweep):
        return sweep_table(result)
    return search_table(result) if isinstance(result, Search) else comparison_table(result)


def _draw(result: Result) -> Picture:
    if isinstance(result, Sweep):
        return draw_sweep(result)
    return draw_search(result) if isinstance(result, Search) else draw_comparison(result)


def describe_data(data: dict[str, Any]) -> str:
    """One line about the documents."""
    synthetic = data["synthetic"]
    source = f"synthetic (seed {synthetic['seed']})" if synthetic else data["store"]
    return (
        f"{source}, {data['documents']:,} documents, {data['mean_length']:.1f} tokens on average, at most "
        f"{data['max_length']:,}, vocabulary {data['vocabulary']:,}, latents {data['slots']} x {data['channels']}"
    )


_COLOURS = {"baseline": BLUE, FASTER: GREEN, SLOWER: ORANGE, SAME: GREY}


def draw_comparison(comparison: Comparison) -> Picture:
    """Tokens per second and peak memory of each arm, side by side."""
    rows = comparison.rows[::-1]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        _rate_bars(left, rows)
        _memory_bars(right, rows)
        explain_colours(figure, _COLOURS)

    caption = "Median and quartiles over timed blocks; the ratio is to the baseline."
    return make_figure("chart", "Speed and memory", caption, (9.0, 1.2 + 0.32 * len(rows)), draw)


def _rate_bars(axes: Axes, rows: list[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    for place, row in enumerate(rows):
        rate = row.tokens_per_second
        if rate is None:
            axes.text(0.0, place, f" {(row.failure or '')[:58]}", va="center", color=ORANGE, fontsize=7.5)
            continue
        axes.barh(place, rate.median, color=_COLOURS.get(row.verdict, GREY))
        errors = [[rate.median - rate.low], [rate.high - rate.median]]
        axes.errorbar(rate.median, place, xerr=errors, color=INK, linewidth=1, capsize=2)
        if row.speedup is not None:
            axes.annotate(
                f"{row.speedup.value:.2f}x", (rate.high, place), (5, 0), textcoords="offset points", va="center",
                fontsize=8,
            )  # fmt: skip
        elif row.doubt:
            axes.annotate(
                "not measured", (rate.high, place), (5, 0), textcoords="offset points", va="center", fontsize=8,
                color=ORANGE,
            )  # fmt: skip
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens/s: median, quartiles, and ratio to the baseline")
    axes.set_xlim(
        0, 1.15 * max((row.tokens_per_second.high for row in rows if row.tokens_per_second), default=1)
    )
    axes.grid(axis="x")


def _memory_bars(axes: Axes, rows: list[Row]) -> None:
    for place, row in enumerate(rows):
        if row.memory is not None:
            axes.barh(place, row.memory / 2**30, color=_COLOURS.get(row.verdict, GREY), alpha=0.6)
            axes.annotate(
                f"{row.memory / 2**30:.2f}", (row.memory / 2**30, place), (4, 0), textcoords="offset points",
                va="center", fontsize=8,
            )  # fmt: skip
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("peak memory, GiB")
    axes.margins(x=0.18)
    axes.grid(axis="x")
