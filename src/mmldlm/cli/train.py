"""`mmldlm train`: train a recipe, or resume a run."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mmldlm.cli import BEGAN
from mmldlm.cli.options import Texts, argument, option, takes
from mmldlm.cli.terminal import LINE_SECONDS, ProgressBar
from mmldlm.reports import BLUE, GREEN, GREY, ORANGE, Picture, counted, make_panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mmldlm.config import Config, OptimConfig
    from mmldlm.training.plan import Course

_COLOURS = {"l2t": BLUE, "t2l": ORANGE, "joint": GREEN}
_SHOWN = {
    "loss": "loss {:.3f}",
    "valid_loss": "valid {:.3f}",
    "documents_per_second": "{:,.0f} docs/s",
    "tokens_per_second": "{:,.0f} tok/s",
    "mfu": "MFU {:.0%}",
    "data_wait": "data wait {:.0%}",
}
"""Fields of the log beside the bar."""


TRAIN = {
    "recipe": option(str, ..., "Name of a recipe that comes with the package, or a YAML file."),
    "settings": argument(Texts, None, "section.key=value, any number."),
    # torchrun takes a --run for its own --run-path, so there is a second name
    "run": option(Path | None, None, "Folder of the run; default: saved/<name>.", "--run", "--run-folder"),
    "dry_run": option(bool, False, "Print the resolved run and stop.", "--dry-run"),
    "plot": option(
        Path | None, None, "With --dry-run: draw learning rate, batch and modes over the steps into this PNG file."
    ),
}  # fmt: skip


@takes(TRAIN)
def train(words: Any) -> None:
    """Train a recipe. The same command again resumes the run."""
    from mmldlm.config.recipe import load_recipe

    config = load_recipe(words.recipe, words.settings)
    run = words.run or Path("saved") / config.name
    if words.plot is not None:
        _check_plot(words.plot, words.dry_run)
    if words.dry_run:
        show_plan(config, words.plot, run)
        return
    try:
        train_shown(config, run, BEGAN)
    except KeyboardInterrupt:  # the second one: threads that still write a checkpoint are not waited for
        print("mmldlm: left at once; the same command resumes from the last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)


def train_shown(config: Config, path: Path, began: float | None = None) -> None:
    """Train with a progress bar; of several ranks the main one has it. `began`: when the command did."""
    gc.disable()  # looking for garbage among modules takes a tenth of the time to import them, and finds none
    from mmldlm.api.train import train_config
    from mmldlm.metrics import rich_console

    gc.freeze()
    gc.enable()
    with TrainProgress() as progress:
        run = train_config(config, path, progress, rich_console(progress.console), began)
    if os.environ.get("RANK", "0") == "0":
        progress.note(
            f"run {run.path}: {counted(run.step, 'step')} done; weights for use are in {run.path / 'export'}"
        )


class _LastingConsole(Console):
    """A console whose reader may go, as of `... | tee log`: the run continues, train.log has everything."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        # what it still holds must not fail at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class TrainProgress(ProgressBar):
    """A progress bar with loss, rate and time left; the first and the last line are always printed."""

    def __init__(self) -> None:
        super().__init__("train", unit="steps", console=_LastingConsole(stderr=True))
        self._status: dict[str, str] = {}
        self._total = 0

    def start(self, step: int, num_steps: int) -> None:
        self._total = num_steps
        self.begin(step, num_steps)
        self.line_at -= LINE_SECONDS

    def update(self, step: int, fields: dict[str, Any]) -> None:
        known = {key: fields[key] for key in _SHOWN if fields.get(key) is not None}
        self._status |= {key: _SHOWN[key].format(value) for key, value in known.items()}
        if step == self._total:
            self.line_at = 0.0
        self(step, self._total, ", ".join(self._status.values()))

    def line(self, done: int, total: int, rate: float, status: str | None) -> str:
        """What is printed where there is no terminal."""
        return f"train: step {done} of {total}, {status}"


def _check_plot(plot: Path, dry_run: bool) -> None:
    """Reject a file that cannot be drawn, before anything else is done."""
    from mmldlm.errors import UserError

    if not dry_run:
        raise UserError(f"--plot {plot}: only --dry-run draws the plan of a run; add it, or leave --plot out")
    if plot.suffix.lower() != ".png":
        raise UserError(f"--plot {plot}: a file name that ends in .png is needed")
    if not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no folder {plot.parent}; make it, or give another file")


def show_plan(config: Config, plot: Path | None = None, run: Path | None = None) -> None:
    """Print settings, sizes and time of a run without training; draw its course if asked to.

    The settings are many, so they come first, and what they amount to is at the end, where a screen shows it.
    """
    from mmldlm.api.train import plan_run
    from mmldlm.reports import folding_table

    plan, console = plan_run(config, run), Console()
    console.print(plan.settings.rstrip(), highlight=False, markup=False, soft_wrap=True)
    table = folding_table("what", "value", title="this run")
    for key, value in plan.sizes.items():
        if key == "parameters":
            parts = ", ".join(f"{part} {count:,}" for part, count in value.items())
            table.add_row("parameters", f"{sum(value.values()):,}: {parts}")
        elif key not in ("parameters_total", "memory_bytes"):
            table.add_row(key.replace("_", " "), _shown(value))
    table.add_row("memory estimate", f"{plan.sizes['memory_bytes'] / 2**30:.2f} GiB")
    table.add_row("time estimate", plan.time.describe(config.train.steps))
    console.print(table)
    if plot is not None:
        _draw_course(plan.course, config, plot)
        text = f"learning rate, batch and modes over the steps are drawn in {plot}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)


def _shown(value: object) -> str:
    """A value of the plan for people."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _draw_course(course: Course, config: Config, plot: Path) -> None:
    from mmldlm.errors import UserError

    picture = draw_course(course, config.optim)
    try:
        plot.write_bytes(picture.png)
    except OSError as error:
        raise UserError(
            f"--plot {plot}: cannot be written ({error.strerror}); choose another file"
        ) from error


def draw_course(course: Course, optim: OptimConfig) -> Picture:
    """Learning rate, size of a step, and shares of the modes, one above the other."""

    def rate(axes: Axes) -> None:
        axes.plot(course.steps, course.lr, color=BLUE)
        axes.set_ylim(bottom=0.0)
        axes.set_ylabel("learning rate")
        axes.set_title(f"optim.schedule={optim.schedule}", loc="left")
        if optim.schedule == "plateau":
            axes.axhline(optim.plateau_min_lr, color=GREY, linestyle=":", label="optim.plateau_min_lr")
            axes.plot([], [], color=BLUE, label="before any reduction")
            axes.legend()

    def size(axes: Axes) -> None:
        axes.plot(course.steps, course.tokens, color=BLUE)
        axes.set_ylim(0.0, 1.1 * max(course.tokens))
        axes.set_ylabel("tokens per step")
        length = course.tokens[0] / course.documents[0]  # on average the same at every step
        to_documents, to_tokens = (lambda values: values / length), (lambda values: values * length)
        documents = axes.secondary_yaxis("right", functions=(to_documents, to_tokens))
        documents.set_ylabel("documents per step")

    def modes(axes: Axes) -> None:
        chosen = {mode: shares for mode, shares in course.modes.items() if max(shares) > 0}
        colours = [_COLOURS[mode] for mode in chosen]
        axes.stackplot(
            course.steps, *chosen.values(), labels=list(chosen), colors=colours, alpha=0.7, step="post"
        )
        axes.set_ylim(0.0, 1.0)
        axes.set_ylabel("share of modes")
        axes.set_xlabel("step")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 0.98), ncols=len(chosen))

    caption = "As the settings alone decide it; rollbacks and reductions on a plateau come on top."
    return make_panels("course", "The course of the run", caption, [rate, size, modes])
