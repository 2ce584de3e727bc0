"""Searches over one setting: a sweep of values, and the largest and the fastest batch under a memory limit.

Sweep: beside each point stands the work, in floating-point operations counted from the shapes.
Batch: a whole step in one micro-batch. Its size is doubled until one does not fit, then the gap is halved, in multiples
of a unit, until it is a sixteenth of the size or less. Every try is a fresh process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.comparison import Row, row_of, run_rounds
from mmldlm.benchmark.measuring import Bench, Trial
from mmldlm.errors import UserError
from mmldlm.reports import BLUE, GREY, Picture, make_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STORE_KEYS = ("length", "documents")
"""Not settings, but properties of the synthetic store."""


@dataclass
class Point:
    """One value of the key."""

    value: str
    row: Row

    @property
    def number(self) -> float | None:
        """The value as a number, if it is one."""
        try:
            return float(self.value)
        except ValueError:
            return None


@dataclass
class Sweep:
    """All values of a key."""

    key: str
    points: list[Point] = field(default_factory=list)
    partial: bool = False

    def growth(self, what: str) -> list[float | None]:
        """A figure of every point over that of the first point that has it."""
        values = [getattr(point.row, what) for point in self.points]
        first = next((value for value in values if value), None)
        return [value / first if first and value is not None else None for value in values]

    def to_json(self) -> dict[str, Any]:
        points = [{"value": point.value, **asdict(point.row)} for point in self.points]
        return {"key": self.key, "points": points}


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """`section.key=a,b,c` as a key and its values."""
    key, _, values = text.partition("=")
    words = [word.strip() for word in values.split(",") if word.strip()]
    if not key.strip() or len(words) < 2 or len(set(words)) < len(words):
        raise UserError(
            f"--sweep {text}: write a setting and at least two different values, such as "
            f"batch.tokens_per_step=4096,8192,16384"
        )
    if key in STORE_KEYS and not all(word.isdigit() and int(word) > 0 for word in words):
        raise UserError(f"--sweep {text}: {key} needs whole numbers from 1")
    return key.strip(), words


def sweep_arms(key: str, values: list[str], make: Callable[[str, int], Path]) -> list[Arm]:
    """An arm for each value; `make` gives the synthetic store with another length or number of documents."""

    def settings(value: str) -> tuple[str, ...]:
        return (f"data.store={make(key, int(value))}",) if key in STORE_KEYS else (f"{key}={value}",)

    return [Arm(f"{key}={value}", settings(value)) for value in values]


def sweep(bench: Bench, key: str, arms: list[Arm]) -> Sweep:
    """Measure every value in interleaved rounds; Ctrl-C keeps what there is."""
    result = Sweep(key)
    try:
        run_rounds(bench, arms)
    except KeyboardInterrupt:
        result.partial = True
    for arm in arms:
        trials = [trial for trial in bench.trials if trial.arm == arm.name]
        result.points.append(Point(arm.name.partition("=")[2], row_of(arm, trials)))
    return result


KEY = "batch.tokens_per_step"
_FINENESS = 16
_MOST_TOKENS = 2**26
"""Beyond this nobody asks: the search ends even where everything fits."""


@dataclass
class Try:
    tokens: int
    row: Row


@dataclass
class Search:
    """Every size that was tried, in order of size."""

    tries: list[Try] = field(default_factory=list)
    partial: bool = False
    stopped_by: str | None = None
    """A failure that has nothing to do with memory."""

    @property
    def fitting(self) -> list[Try]:
        return [one for one in self.tries if one.row.failure is None]

    @property
    def largest(self) -> Try | None:
        return max(self.fitting, key=lambda one: one.tokens, default=None)

    @property
    def fastest(self) -> Try | None:
        return max(self.fitting, key=_speed, default=None)

    def to_json(self) -> dict[str, Any]:
        return {
            "key": KEY,
            "largest": self.largest.tokens if self.largest else None,
            "fastest": self.fastest.tokens if self.fastest else None,
            "stopped_by": self.stopped_by,
            "tries": [{"tokens_per_step": one.tokens, **asdict(one.row)} for one in self.tries],
        }


def _speed(one: Try) -> float:
    return one.row.tokens_per_second.median if one.row.tokens_per_second else 0.0


class HaltError(Exception):
    """The search cannot go on; the reason is in the last trial."""


def find_batch(bench: Bench, arm: Arm, unit: int) -> Search:
    """Search over multiples of a unit; Ctrl-C keeps what there is."""
    search = Search()

    def fits(count: int) -> bool:
        tokens = count * unit
        settings = (*arm.settings, f"{KEY}={tokens}", "batch.micro_tokens=null")
        tried = Arm(f"{tokens} tokens", settings)
        trial = bench.run(tried)
        search.tries.append(Try(tokens, row_of(tried, [trial])))
        search.tries.sort(key=lambda one: one.tokens)
        return _went_through(trial)

    try:
        largest_multiple(fits, _MOST_TOKENS // unit)
    except HaltError as reason:
        search.stopped_by = str(reason)
    except KeyboardInterrupt:
        search.partial = True
    return search


def _went_through(trial: Trial) -> bool:
    if trial.failure is None:
        return True
    if trial.failure.kind in ("memory", "timeout"):
        return False
    raise HaltError(trial.failure.reason)


def largest_multiple(fits: Callable[[int], bool], most: int) -> int:
    """Largest count up to `most` that fits, to within a sixteenth; 0 if not even 1 does. `fits` must be monotone."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > max(1, low // _FINENESS):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


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
