"""`mmldlm ablate`: does a setting help? Trainings that differ by settings, several seeds each, one table."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mmldlm.ablation.plan import Plan
    from mmldlm.ablation.report import Report
    from mmldlm.ablation.rounds import Ended, Rounds
    from mmldlm.ablation.work import Job, Work

_LINE_EVERY = 30.0
"""Seconds between two lines where there is no terminal for a live one."""
_LOOK_EVERY = 1.0
"""Seconds between two looks at how far a run is."""


def ablate(
    plan: Annotated[str, typer.Argument(help="Name of a plan that comes with the package, or a YAML file.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="section.key=value for every arm, after the plan's base.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of runs and results; ablations/<plan> unless told otherwise.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each arm.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time; they share the device.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Set every arm up, print what would run, and stop.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as one JSON object, the last line of stdout.")
    ] = False,
) -> None:
    """Train the arms of a plan with several seeds, evaluate all, and write a table with error bars.

    The same command again goes on where it was.
    """
    from mmldlm.ablation.plan import load_plan
    from mmldlm.ablation.work import open_work
    from mmldlm.cli.device import device_of

    loaded = load_plan(plan, settings, device_of(device).type)
    work = open_work(loaded, out or Path("ablations") / loaded.path.stem, seeds)
    if dry_run:
        _show_plan(loaded, work)
        return
    _check_machine(loaded)
    with _folder_held(work):
        _check_encoder(work)
        _run(work, jobs, as_json)


def _check_machine(plan: Plan) -> None:
    """Refuse settings that only a GPU has before the first run begins; a GPU itself is left to the runs."""
    from mmldlm.cli.device import device_of
    from mmldlm.errors import UserError
    from mmldlm.runtime import settle_runtime

    device = device_of(plan.device)
    if device.type == "cuda":
        return
    for arm in plan.trained:
        try:
            settle_runtime(plan.config(arm, 0), device)
        except UserError as error:
            raise UserError(f"{plan.path}: arm {arm.name!r}: {error}") from error


def _check_encoder(work: Work) -> None:
    """Load the encoder once, where it will be used: a mistake must not wait until the first run is trained."""
    from mmldlm.data.store import PairStore
    from mmldlm.errors import UserError
    from mmldlm.preparation.encoders import open_encoder

    plan = work.plan
    if not plan.evaluation.encoder:
        return
    store = PairStore.open(plan.configs[plan.arms[0].name].data.store)
    if store.manifest.encoder is None or store.tokenizer_path() is None:
        raise UserError(
            f"{plan.path}: eval: encoder: true: {store.path} was made without a known encoder or tokenizer"
        )
    try:
        open_encoder(store.manifest.encoder, device="cpu")
    except UserError as error:
        raise UserError(f"{plan.path}: eval: encoder: true: {error}") from error


@contextlib.contextmanager
def _folder_held(work: Work) -> Iterator[None]:
    """A second ablation in the same folder is refused."""
    from mmldlm.ablation.work import write_plan
    from mmldlm.errors import UserError
    from mmldlm.run_folder import RunFolder, lock_run

    work.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(lock_run(RunFolder(work.folder), patience=0.5))
        except UserError as error:
            raise UserError(
                f"--out {work.folder}: another ablation is writing here; wait for it, or choose another folder"
            ) from error
        write_plan(work)
        yield


def _run(work: Work, jobs: int, as_json: bool) -> None:
    from mmldlm.ablation.report import Report
    from mmldlm.ablation.rounds import Rounds
    from mmldlm.benchmark.environment import describe_environment
    from mmldlm.cli.benchmark import terminated_as_interrupted

    report = Report(work, describe_environment(["mmldlm", *sys.argv[1:]]), jobs)
    with Progress() as progress, terminated_as_interrupted():

        def ended(one: Ended) -> None:
            if one.failure is not None:
                report.failures[one.job.title] = one.failure
            progress.ended(one)
            report.write(whole=False, picture=False)

        rounds = Rounds(work, jobs, progress.update, ended)
        rounds.run()
    _finish(report, rounds, as_json)


def _finish(report: Report, rounds: Rounds, as_json: bool) -> None:
    from mmldlm.ablation.report import TABLE, make_tables
    from mmldlm.cli.evaluate import show
    from mmldlm.errors import Interrupted
    from mmldlm.evaluation.report import json_bytes

    folder = report.work.folder
    summary, result = report.write(whole=not rounds.stopped and not rounds.failed)
    if as_json:
        typer.echo(json_bytes(result, indent=None).decode().rstrip("\n"))
    else:
        plan = report.work.plan
        about = f"{len(plan.arms)} arms, {summary.num_seeds} seeds, plan {plan.path}"
        show(about, make_tables(summary, plan)[1:], report.notes(summary), folder / TABLE)
    if rounds.stopped:
        raise Interrupted(
            f"stopped; what is there is in {folder / TABLE}, and the same command goes on from here"
        )
    if rounds.failed:
        for one in rounds.failed:
            log = report.work.log_path(one.job)
            typer.echo(f"mmldlm: {one.job.title} failed: {one.failure} (log: {log})", err=True)
        raise typer.Exit(1)


class Progress:
    """A live line in a terminal; elsewhere a line now and then. Runs that end are told above it."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self.console: Console = Console(stderr=True)
        self._bar = Bar(
            TextColumn("ablate"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False), console=self.console, disable=not self.console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._quiet_until = time.monotonic() + _LINE_EVERY
        self._seen: dict[str, tuple[float, str]] = {}

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, rounds: Rounds) -> None:
        """Done, running, failed."""
        done, failed = len(rounds.ended) - len(rounds.failed), len(rounds.failed)
        total = len(rounds.ended) + len(rounds.running) + len(rounds.waiting)
        names = "; ".join(self._where(one.job) for one in rounds.running)
        state = "stopping" if rounds.stopped else "running"
        told = f"{len(rounds.running)} {state}, {failed} failed: {names}"
        self._bar.update(self._task, completed=done, total=total, description=told)
        if not self.console.is_terminal and time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + _LINE_EVERY
            self._say(f"ablate: {done} of {total} runs done, {told}")

    def _where(self, job: Job) -> str:
        """A run and its step, as its heartbeat says once a second."""
        from mmldlm.run_folder import RunFolder

        looked_at, told = self._seen.get(job.run, (-_LOOK_EVERY, job.title))
        if time.monotonic() - looked_at < _LOOK_EVERY:
            return told
        try:
            beat = json.loads(RunFolder(Path(job.run)).heartbeat.read_bytes())
            told = f"{job.title}, step {int(beat['step']):,}"
        except (OSError, ValueError, KeyError, TypeError):
            told = job.title
        self._seen[job.run] = (time.monotonic(), told)
        return told

    def ended(self, one: Ended) -> None:
        """A run is over."""
        told = "done" if one.failure is None else f"failed: {one.failure}"
        self._say(f"ablate: {one.job.title}: {told} ({one.seconds:.0f} s)")

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _show_plan(plan: Plan, work: Work) -> None:
    """Every arm, really set up: what it changes, its size, how far it gets."""
    from rich.console import Console
    from rich.text import Text

    from mmldlm.cli.folding import folding_table
    from mmldlm.runtime import start_runtime
    from mmldlm.training.plan import describe
    from mmldlm.training.setup import set_up

    head = ("arm", "parameters", "steps", "epochs", "what it changes")
    table = folding_table(*head, title=f"plan {plan.path}")
    for arm in plan.arms:
        config = plan.config(arm, 0)
        sizes = ["as " + arm.of, "", ""] if arm.of is not None else []
        if not sizes:
            found = describe(set_up(config, start_runtime(config)))
            sizes = [
                f"{sum(found['parameters'].values()):,}",
                f"{config.train.steps:,}",
                str(found["epochs"]),
            ]
        table.add_row(*map(Text, [arm.name, *sizes, arm.change]))
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)
    todo = len(work.jobs())
    total = len(plan.trained) * len(work.seeds)
    typer.echo(f"{total} runs ({len(work.seeds)} seeds), {total - todo} of them done; folder {work.folder}")
