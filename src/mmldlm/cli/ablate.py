"""`mmldlm ablate`: does a setting help? Trainings that differ by settings, several seeds each, one table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmldlm.cli.options import Texts, argument, option, takes
from mmldlm.cli.terminal import ProgressBar, print_json

if TYPE_CHECKING:
    from mmldlm.ablation.session import Ended, Finished, Rounds
    from mmldlm.ablation.work import Job, Work

ABLATE = {
    "plan": argument(str, ..., "Name of a plan that comes with the package, or a YAML file."),
    "settings": argument(Texts, None, "section.key=value for every arm, after the plan's base."),
    "out": option(
        Path | None, None, "Folder of runs and results; by default ablations/PLAN.", metavar="FOLDER"
    ),
    "seeds": option(int, 3, "Trainings of each arm.", min=1),
    "jobs": option(int, 1, "Runs at the same time; they share the device.", min=1),
    "device": option(str, "auto", "auto, cpu, cuda, mps, xpu or cuda:1."),
    "dry_run": option(bool, False, "Set every arm up, print what would run, and stop.", "--dry-run"),
    "as_json": option(bool, False, "Print the result as one JSON object, the last line of stdout.", "--json"),
}
RUN = {
    "job": argument(Path, ..., "The job, as 'mmldlm ablate' writes it."),
    "parent": argument(int, ..., "Process of the ablation; when it ends, so does this one."),
}


@takes(ABLATE)
def ablate(words: Any) -> None:
    """Train the arms of a plan with several seeds, evaluate all, and write a table with error bars.

    The same command again continues where it stopped.
    """
    from mmldlm.ablation.session import plan_ablation, run_ablation
    from mmldlm.cli.benchmark import terminated_as_interrupted

    work = plan_ablation(words.plan, words.settings, words.out, words.seeds, words.device)
    if words.dry_run:
        _show_plan(work)
        return
    with _Progress() as progress, terminated_as_interrupted():
        finished = run_ablation(work, words.jobs, progress.update, progress.ended)
    _finish(finished, words.as_json)


@takes(RUN)
def ablate_run(words: Any) -> None:
    """Hidden: train one run of an ablation and evaluate it."""
    from mmldlm.ablation.session import run_job

    run_job(words.job, words.parent)


def _finish(finished: Finished, as_json: bool) -> None:
    from mmldlm.ablation.report import PAGE, TABLE, make_tables
    from mmldlm.errors import Interrupted
    from mmldlm.reports import show_tables

    folder, summary, plan = finished.folder, finished.summary, finished.report.work.plan
    if as_json:
        print_json(finished.values)
    else:
        about = f"{len(plan.arms)} arms, {summary.num_seeds} seeds, plan {plan.path}"
        notes = [f"note: {note}" for note in finished.report.notes(summary)]
        show_tables(make_tables(summary, plan)[1:], [about], [*notes, f"report: {folder / PAGE}"])
    if finished.rounds.stopped:
        raise Interrupted(
            f"stopped; what is there is in {folder / TABLE}, and the same command continues from here"
        )
    if finished.rounds.failed:
        for one in finished.rounds.failed:
            log = finished.report.work.log_path(one.job)
            typer.echo(f"mmldlm: {one.job.title} failed: {one.failure} (log: {log})", err=True)
        raise typer.Exit(1)


class _Progress(ProgressBar):
    """Follows the rounds; runs that end are reported above the bar."""

    def __init__(self) -> None:
        super().__init__("ablate", unit="runs done")

    def update(self, rounds: Rounds) -> None:
        done, failed = len(rounds.ended) - len(rounds.failed), len(rounds.failed)
        total = len(rounds.ended) + len(rounds.running) + len(rounds.waiting)
        names = "; ".join(_with_step(one.job) for one in rounds.running)
        state = "stopping" if rounds.stopped else "running"
        self(done, total, f"{len(rounds.running)} {state}, {failed} failed: {names}")

    def ended(self, one: Ended) -> None:
        outcome = "done" if one.failure is None else f"failed: {one.failure}"
        self.note(f"ablate: {one.job.title}: {outcome} ({one.seconds:.0f} s)")


def _with_step(job: Job) -> str:
    """A run and its step, from its heartbeat."""
    from mmldlm.run_folder import RunFolder

    step = RunFolder(Path(job.run)).heartbeat_step()
    return f"{job.title}, step {step:,}" if step else job.title


def _show_plan(work: Work) -> None:
    """Every arm, really set up: what it changes, its size, how far it gets."""
    from mmldlm.reports import Table, show_tables
    from mmldlm.runtime import start_runtime
    from mmldlm.training.plan import describe
    from mmldlm.training.setup import set_up

    plan, rows = work.plan, []
    for arm in plan.arms:
        config = plan.config(arm, 0)
        sizes = ["as " + arm.of, "", ""] if arm.of is not None else []
        if not sizes:
            described = describe(set_up(config, start_runtime(config)))
            parameters = sum(described["parameters"].values())
            sizes = [f"{parameters:,}", f"{config.train.steps:,}", str(described["epochs"])]
        rows.append([arm.name, *sizes, arm.change])
    head = ["arm", "parameters", "steps", "epochs", "what it changes"]
    total = len(plan.trained) * len(work.seeds)
    done = f"{total} runs ({len(work.seeds)} seeds), {total - len(work.jobs())} of them done"
    show_tables([Table(f"plan {plan.path}", "", head, rows)], after=[f"{done}; folder {work.folder}"])
