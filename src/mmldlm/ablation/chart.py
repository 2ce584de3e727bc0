"""The table as a picture: how far each arm is from the first, a panel for each quantity."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from mmldlm.ablation.statistics import BETTER, SAME, WORSE
from mmldlm.ablation.summary import Column, Row, Summary
from mmldlm.benchmark.chart import save
from mmldlm.evaluation.figure import BLUE, GREEN, GREY, ORANGE
from mmldlm.evaluation.quantities import MORE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {BETTER: GREEN, WORSE: ORANGE, SAME: GREY}
_ACROSS = 4
"""Most panels side by side."""


def draw(summary: Summary, folder: Path) -> None:
    """chart.png and chart.svg: mean difference from the first arm with its 95 % interval."""
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
        _explain_colours(figure)

    save(folder, (2.2 + 2.4 * across, down * (1.3 + 0.24 * len(rows))), draw_panels)


def _panel(axes: Axes, column: Column, rows: list[Row], first: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.axvline(0.0, color=BLUE, linewidth=1)
    for place, row in enumerate(rows):
        cell = row.cells.get(column.name)
        if cell is None:
            continue
        found = cell.difference
        if found is None:
            axes.plot([0.0], [place], marker="o", markersize=4.5, color=BLUE)
            continue
        colour = _COLOURS.get(cell.verdict, GREY)
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [place, place], color=colour, linewidth=1.6)
        filled = colour if found.low is not None else "white"
        axes.plot(
            [found.value], [place], marker="o", markersize=4.5, color=colour, markerfacecolor=filled, linestyle=""
        )  # fmt: skip
    direction = "right is better" if column.better == MORE else "left is better"
    axes.set_title("\n".join(textwrap.wrap(column.title, 30)), fontsize=8)
    axes.set_xlabel(f"minus {first} ({direction})", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(axis="x")


def _explain_colours(figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8)
