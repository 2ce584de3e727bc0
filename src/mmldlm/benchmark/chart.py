"""The result as a picture: bars for arms, lines for sweeps and for the search of a batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmldlm.benchmark.comparison import FASTER, SAME, SLOWER, Comparison, Row
from mmldlm.benchmark.search import KEY, Search, Sweep
from mmldlm.reports import BLUE, GREEN, GREY, INK, ORANGE, Picture, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = {"baseline": BLUE, FASTER: GREEN, SLOWER: ORANGE, SAME: GREY}


def draw_comparison(comparison: Comparison) -> Picture:
    """Tokens per second and peak memory of each arm, side by side."""
    rows = comparison.rows[::-1]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 2])
        _rate_bars(left, rows)
        _memory_bars(right, rows)
        _explain_colours(figure)

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
    axes.set_yticks(range(len(rows)), [row.name for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel("tokens/s: median, quartiles, and ratio to the baseline")
    axes.set_xlim(
        0, 1.15 * max((row.tokens_per_second.high for row in rows if row.tokens_per_second), default=1)
    )
    axes.grid(axis="x")


def _explain_colours(figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for label, colour in _COLOURS.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8)


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


def draw_sweep(sweep: Sweep) -> Picture:
    """Time and memory against the key, with the work as a thin line; time on logarithmic axes."""
    points = [point for point in sweep.points if point.row.tokens_per_second is not None]
    numbers = [point.number for point in points]
    numeric = all(number is not None and number > 0 for number in numbers)
    xs: list[Any] = numbers if numeric else [point.value for point in points]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        times = [point.row.seconds_per_step for point in points]
        _curve(left, xs, times, "seconds per step")
        flops = [point.row.flops_per_step for point in points]
        if times and times[0] and flops[0]:
            work = [times[0] * value / flops[0] for value in flops if value]
            left.plot(xs, work, color=GREY, linewidth=1, linestyle="--", label="as the work grows")
            left.legend()
        _curve(right, xs, [(point.row.memory or 0) / 2**30 for point in points], "peak memory, GiB")
        right.set_ylim(bottom=0)
        for axes in (left, right):
            axes.set_xlabel(sweep.key)
        if numeric and points:
            _logarithmic(left, xs)
            right.xaxis.set_major_formatter("{x:,g}")
            right.locator_params(axis="x", nbins=5)

    caption = "Medians; dashed: time if it grew as the work does."
    return make_figure("chart", f"Time and memory against {sweep.key}", caption, (8.0, 3.4), draw)


def draw_search(search: Search) -> Picture:
    """Tokens per second and memory against the batch."""
    tries = [one for one in search.fitting if one.row.tokens_per_second is not None]
    xs = [one.tokens for one in tries]

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        rates = [one.row.tokens_per_second.median for one in tries if one.row.tokens_per_second]
        _curve(left, xs, rates, "tokens/s")
        _curve(right, xs, [(one.row.memory or 0) / 2**30 for one in tries], "peak memory, GiB")
        for axes in (left, right):
            axes.set_xlabel(KEY)
            axes.set_ylim(bottom=0)

    return make_figure("chart", "Speed and memory against the batch", "Medians.", (8.0, 3.4), draw)


def _curve(axes: Axes, xs: list[Any], ys: list[Any], label: str) -> None:
    axes.plot(xs, ys, color=BLUE, marker="o", markersize=4)
    axes.set_ylabel(label)
    axes.grid()


def _logarithmic(axes: Axes, xs: list[float]) -> None:
    """In both directions, so that a power of the key is a straight line."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(xs, [f"{x:,g}" for x in xs])
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [base * 10.0**power for power in range(-6, 7) for base in (1, 2, 5)]
    axes.set_yticks([tick for tick in ticks if low <= tick <= high])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
