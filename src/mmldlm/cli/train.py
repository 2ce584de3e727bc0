"""`mmldlm train`: train a recipe, or resume a run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mmldlm.config import Config
    from mmldlm.training.plan import Course


def train(
    recipe: Annotated[
        str, typer.Option(help="Name of a recipe that comes with the package, or a YAML file.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(help="section.key=value, any number.")] = None,
    run: Annotated[
        Path | None,
        # torchrun takes a --run for its own --run-path, so there is a second name
        typer.Option("--run", "--run-folder", help="Folder of the run; default: saved/<name>."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the resolved run and stop.")] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="With --dry-run: draw learning rate, batch and modes over the steps into this PNG file."
        ),
    ] = None,
) -> None:
    """Train a recipe. The same command again resumes the run."""
    from mmldlm.config.recipe import load_recipe

    config = load_recipe(recipe, settings)
    if plot is not None:
        _check_plot(plot, dry_run)
    if dry_run:
        show_plan(config, plot)
        return
    try:
        train_shown(config, run or Path("saved") / config.name)
    except KeyboardInterrupt:  # the second one: threads that still write a checkpoint are not waited for
        print("mmldlm: left at once; the same command resumes from the last checkpoint", file=sys.stderr)
        sys.stderr.flush()
        os._exit(130)


def train_shown(config: Config, path: Path) -> None:
    """Train with a progress bar; of several ranks the main one has it."""
    from mmldlm.api.train import train_config
    from mmldlm.metrics import rich_console

    with TrainProgress() as progress:
        run = train_config(config, path, progress, rich_console(progress.console))
    if os.environ.get("RANK", "0") == "0":
        text = f"run {run.path}: {run.step} steps done; weights for use are in {run.path / 'export'}"
        progress.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _lasting_console() -> Any:
    """A console on stderr whose reader may go, as of `... | tee log`: the run continues, train.log has everything."""
    from rich.console import Console

    class LastingConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True

    return LastingConsole(stderr=True)


class TrainProgress:
    """A progress bar with loss, rate and time left; plain lines where there is no terminal."""

    def __init__(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.console = _lasting_console()
        self._bar = Progress(
            TextColumn("train"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("train", total=None, status="")
        self._status: dict[str, str] = {}
        self._plain_after = 0.0

    def __enter__(self) -> TrainProgress:
        self._bar.start()
        return self

    def __exit__(self, *unused: object) -> None:
        self._bar.stop()

    def start(self, step: int, num_steps: int) -> None:
        """The run begins at a step."""
        self._total = num_steps
        self._bar.update(self._task, total=num_steps, completed=step)

    def update(self, step: int, fields: dict[str, Any]) -> None:
        """A line was logged."""
        shown = {
            "loss": "loss {:.3f}",
            "valid_loss": "valid {:.3f}",
            "documents_per_second": "{:,.0f} docs/s",
            "tokens_per_second": "{:,.0f} tok/s",
            "mfu": "MFU {:.0%}",
            "data_wait": "data wait {:.0%}",
        }
        self._status |= {
            key: text.format(fields[key]) for key, text in shown.items() if fields.get(key) is not None
        }
        status = ", ".join(self._status.values())
        self._bar.update(self._task, completed=step, status=status)
        if not self.console.is_terminal:
            self._plain_line(step, status)

    def _plain_line(self, step: int, status: str) -> None:
        import time

        if time.monotonic() >= self._plain_after or step == self._total:
            self._plain_after = time.monotonic() + 10.0
            line = f"train: step {step} of {self._total}, {status}"
            self.console.print(line, highlight=False, soft_wrap=True)


def _check_plot(plot: Path, dry_run: bool) -> None:
    """Reject a file that cannot be drawn, before anything else is done."""
    from mmldlm.errors import UserError

    if not dry_run:
        raise UserError(f"--plot {plot}: only --dry-run draws the plan of a run; add it, or leave --plot out")
    if plot.suffix.lower() != ".png":
        raise UserError(f"--plot {plot}: a file name that ends in .png is needed")
    if not plot.absolute().parent.is_dir():
        raise UserError(f"--plot {plot}: there is no folder {plot.parent}; make it, or give another file")


def show_plan(config: Config, plot: Path | None = None) -> None:
    """Print settings, sizes and time of a run without training; draw its course if asked to."""
    from rich.console import Console

    from mmldlm.api.train import plan_run
    from mmldlm.tables import folding_table

    plan, console = plan_run(config), Console()
    console.print(plan.settings.rstrip(), highlight=False, markup=False, soft_wrap=True)
    table = folding_table("what", "value", title="this run")
    for key, value in plan.sizes.items():
        if key == "parameters":
            for part, count in value.items():
                table.add_row(f"parameters in {part}", f"{count:,}")
        elif key != "memory_bytes":
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
    from mmldlm.cli.course import draw_course
    from mmldlm.errors import UserError

    picture = draw_course(course, config.optim)
    try:
        plot.write_bytes(picture.png)
    except OSError as error:
        raise UserError(
            f"--plot {plot}: cannot be written ({error.strerror}); choose another file"
        ) from error
