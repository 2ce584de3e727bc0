"""What an ablation leaves in its folder: result.json, table.md, report.html and chart.png."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mmldlm.ablation.plan import AVERAGED, Plan
from mmldlm.ablation.summary import Cell, Column, Row, Summary, summarise
from mmldlm.ablation.work import Work
from mmldlm.benchmark.machine import machine_facts, summary_lines
from mmldlm.corruption.times import sees_latents
from mmldlm.durable import replace_file
from mmldlm.evaluation.tables import INTERVAL
from mmldlm.json_lines import encode
from mmldlm.reports import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    Picture,
    Table,
    explain_colours,
    make_figure,
    render_page,
    signed,
)
from mmldlm.statistics import BETTER, MORE, SAME, WORSE, Mean, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = "mmldlm-ablation-1"
RESULT, TABLE, PAGE, CHART = "result.json", "table.md", "report.html", "chart.png"
_MARKS = {BETTER: " ▲", WORSE: " ▼"}
_COLOURS = {BETTER: GREEN, WORSE: ORANGE, SAME: GREY}
_ACROSS = 4
"""Most panels side by side."""


@dataclass
class Report:
    """An ablation on its way into its folder."""

    work: Work
    environment: dict[str, Any]
    num_jobs: int
    failures: dict[str, str] = field(default_factory=dict)
    """Runs without a result, and why."""

    def write(self, *, whole: bool, picture: bool = True) -> tuple[Summary, dict[str, Any]]:
        """Everything that is known now; `whole`: no run is still to come."""
        summary = summarise(self.work.plan, self.work.records())
        result = self._result(summary, whole)
        replace_file(self.work.folder / RESULT, encode(result, indent=2))
        replace_file(self.work.folder / TABLE, self._markdown(summary, whole).encode("utf-8", "replace"))
        if picture:
            drawn = [draw(summary)] if summary.columns else []
            for one in drawn:
                replace_file(self.work.folder / CHART, one.png)
            replace_file(self.work.folder / PAGE, self._page(summary, whole, drawn))
        return summary, result

    def notes(self, summary: Summary) -> list[str]:
        """What a reader must know."""
        notes = [_error_note(summary), *_chance_notes(summary)]
        lacking = [row.arm.name for row in summary.rows if len(row.seeds) < len(self.work.seeds)]
        if lacking:
            notes.append(f"fewer than {len(self.work.seeds)} seeds are there of: {', '.join(lacking)}")
        columns = {column.name for column in summary.columns}
        unmeasured = [name for name in self.work.plan.quantities or () if name not in columns]
        if unmeasured and summary.num_seeds:
            notes.append(f"measured by no arm, so not in the table: {', '.join(unmeasured)}")
        configs = self.work.plan.configs
        blind = [row.arm.name for row in summary.rows if not sees_latents(configs[row.arm.name].corruption)]
        if blind:
            notes.append(
                f"never saw a latent (corruption.condition_dropout=1): {', '.join(blind)}; of their text bounds only "
                "text_bound/none is about what they were trained for"
            )
        notes += [
            f"{record.arm} (seed {record.seed}) has collapsed: {record.collapsed}; its other figures of "
            "generated pairs mean nothing"
            for record in self.work.records()
            if record.collapsed
        ]
        notes += [f"failed: {title}: {reason}" for title, reason in self.failures.items()]
        if self.num_jobs > 1:
            notes.append(
                f"{self.num_jobs} runs at a time shared the machine, so each took longer than it would have alone"
            )
        return notes

    def _result(self, summary: Summary, whole: bool) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "partial": not whole,
            "plan": self.work.plan.to_json(),
            "seeds": list(self.work.seeds),
            "first": self.work.plan.arms[0].name,
            "columns": [asdict(column) for column in summary.columns],
            "rows": [row.to_json() for row in summary.rows],
            "runs": [
                {key: value for key, value in record.to_json().items() if key not in ("identity", "format")}
                for record in self.work.records()
            ],
            "failures": self.failures,
            "notes": self.notes(summary),
            "environment": self.environment,
        }

    def _page(self, summary: Summary, whole: bool, pictures: list[Picture]) -> bytes:
        plan = self.work.plan
        partial = [] if whole else ["Partial: not all runs are there."]
        return render_page(
            f"Ablation {plan.path.stem}",
            intro=[*partial, *_plan_lines(plan, self.work)],
            notes=self.notes(summary),
            pictures=pictures,
            tables=make_tables(summary, plan),
            details={"Machine": machine_facts(self.environment)},
        )

    def _markdown(self, summary: Summary, whole: bool) -> str:
        plan = self.work.plan
        partial = [] if whole else ["**Partial: not all runs are there.**", ""]
        facts = [*summary_lines(self.environment), *_plan_lines(plan, self.work)]
        parts = [
            f"# Ablation {plan.path.stem}",
            "",
            *partial,
            *(f"- {line}" for line in facts),
            "",
            *(f"- {note}" for note in self.notes(summary)),
            "",
            *(table.to_markdown() for table in make_tables(summary, plan)),
            *(["![Differences from the first arm](chart.png)", ""] if summary.columns else []),
        ]
        return "\n".join(parts)


def make_tables(summary: Summary, plan: Plan) -> list[Table]:
    """The overview, then a table of differences for each quantity."""
    return [overview(summary, plan), *(_differences(summary, plan, column) for column in summary.columns)]


def overview(summary: Summary, plan: Plan) -> Table:
    """A row for each arm, a column for each quantity."""
    about = (
        f"Mean over seeds ± standard error. ▲ better, ▼ worse than {plan.arms[0].name}: the 95 % interval of the "
        "paired difference excludes 0; ▲▲, ▼▼: also after the correction for the number of comparisons."
    )
    head = [
        "arm",
        *(f"{column.title} ({'↑' if column.better == MORE else '↓'})" for column in summary.columns),
        "seeds",
        "parameters",
        "train s",
    ]
    rows = [
        [
            row.arm.name,
            *(_overview_cell(row.cells.get(column.name)) for column in summary.columns),
            str(len(row.seeds)),
            "-" if row.num_parameters is None else f"{row.num_parameters:,}",
            f"as {row.arm.of}"
            if row.arm.of
            else f"{row.train_seconds.value:.1f}"
            if row.train_seconds
            else "-",
        ]
        for row in summary.rows
    ]
    return Table("All arms", about, head, rows)


def _overview_cell(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    mark = _MARKS.get(cell.verdict, "")
    return _mean(cell.mean) + mark + (mark.strip() if cell.survives else "")


def _mean(mean: Mean) -> str:
    error = "" if mean.standard_error is None else f" ± {mean.standard_error:.4f}"
    return f"{mean.value:.4f}{error}"


def _differences(summary: Summary, plan: Plan, column: Column) -> Table:
    direction = "more" if column.better == MORE else "less"
    first = plan.arms[0].name
    head = ["arm", "verdict", "mean", f"minus {first}", INTERVAL, "p", "p (Holm)", "seeds"]
    rows = [_difference_row(row, cell) for row in summary.rows if (cell := row.cells.get(column.name))]
    about = f"`{column.name}`, {direction} is better. Differences are paired by seed."
    return Table(column.title, about, head, rows)


def _difference_row(row: Row, cell: Cell) -> list[str]:
    difference = cell.difference
    start = [row.arm.name, cell.verdict, _mean(cell.mean)]
    if difference is None:
        return [*start, "", "", "", "", str(cell.mean.count)]
    interval = "no error bar"
    if difference.low is not None and difference.high is not None:
        interval = f"{signed(difference.low, 4)} to {signed(difference.high, 4)}"
    p_values = ["" if p is None else f"{p:.4f}" for p in (difference.p_value, cell.p_holm)]
    return [*start, signed(difference.value, 4), interval, *p_values, str(difference.count)]


def _plan_lines(plan: Plan, work: Work) -> list[str]:
    how = plan.evaluation
    config = plan.configs[plan.arms[0].name]
    lines = [
        f"plan: {plan.path}, recipe {plan.recipe}, base `{' '.join(plan.base) or '(nothing)'}`",
        f"data: {config.data.store}; every arm is evaluated on the same documents of the split "
        f"{work.split(config)}, with the same noise (seed {how.seed})",
    ]
    lines += [f"{arm.name}: `{arm.change}`" for arm in plan.arms if arm.words or arm.weights != AVERAGED]
    return lines


def _error_note(summary: Summary) -> str:
    if summary.num_seeds < 2:
        return "fewer than two seeds: no error bars, and differences cannot be judged; run with --seeds 3"
    return (
        "± is the standard error of the mean over training seeds; intervals of differences are 95 % t-intervals of "
        "differences paired by seed (n - 1 degrees of freedom). They cover what another training seed changes, not "
        "other documents and not other settings"
    )


def _chance_notes(summary: Summary) -> list[str]:
    cells = summary.comparisons
    if not cells:
        return []
    apart = [cell for cell in cells if cell.difference and verdict(cell.difference, MORE) != SAME]
    outside, surviving = len(apart), sum(cell.survives for cell in apart)
    return [
        f"'{SAME}': the interval contains 0. Of the {len(cells)} comparisons here about {0.05 * len(cells):.1f} would "
        f"fall outside by chance if no arm differed; {outside} did, and {surviving} of them still do after Holm's "
        "correction for all comparisons. Rely on those; the others are hints that deserve more seeds"
    ]


def draw(summary: Summary) -> Picture:
    """The table as a picture: mean difference of each arm from the first, a panel for each quantity."""
    rows = summary.rows[::-1]
    down = math.ceil(len(summary.columns) / _ACROSS)
    across = math.ceil(len(summary.columns) / down)

    def draw_panels(figure: Figure) -> None:
        panels = figure.subplots(down, across, sharey=True, squeeze=False).flatten()
        for axes, column in zip(panels, summary.columns, strict=False):
            _panel(axes, column, rows, summary.rows[0].arm.name)
        for axes in panels[len(summary.columns) :]:
            axes.set_axis_off()
        panels[0].set_yticks(range(len(rows)), [row.arm.name for row in rows])
        panels[0].set_ylim(-0.6, len(rows) - 0.4)
        explain_colours(figure, _COLOURS)

    size = (2.2 + 2.4 * across, down * (1.3 + 0.24 * len(rows)))
    caption = "Mean difference from the first arm with its 95 % interval; hollow: no interval."
    return make_figure("chart", "Differences from the first arm", caption, size, draw_panels)


def _panel(axes: Axes, column: Column, rows: list[Row], first: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.axvline(0.0, color=BLUE, linewidth=1)
    for place, row in enumerate(rows):
        cell = row.cells.get(column.name)
        if cell is None:
            continue
        apart = cell.difference
        if apart is None:
            axes.plot([0.0], [place], marker="o", markersize=4.5, color=BLUE)
            continue
        colour = _COLOURS.get(cell.verdict, GREY)
        if apart.low is not None and apart.high is not None:
            axes.plot([apart.low, apart.high], [place, place], color=colour, linewidth=1.6)
        filled = colour if apart.low is not None else "white"
        axes.plot(
            [apart.value], [place], marker="o", markersize=4.5, color=colour, markerfacecolor=filled, linestyle=""
        )  # fmt: skip
    direction = "right is better" if column.better == MORE else "left is better"
    axes.set_title("\n".join(textwrap.wrap(column.title, 30)), fontsize=8)
    axes.set_xlabel(f"minus {first} ({direction})", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x")
