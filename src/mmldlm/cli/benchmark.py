"""`mmldlm benchmark`: what speed-ups gain, and which batch to use; `mmldlm validate`: is the fast path right here?"""

from __future__ import annotations

import contextlib
import datetime
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmldlm.cli.options import Texts, argument, chosen, option, takes
from mmldlm.cli.terminal import ProgressBar
from mmldlm.reports import show_tables

if TYPE_CHECKING:
    from mmldlm.benchmark.session import Finished


_DATA, _HOW, _ARMS, _SEARCH = "Documents", "How it is measured", "What is compared", "Instead of comparing"
TABLE = {
    "settings": argument(Texts, None, "section.key=value for every arm, any number."),
    "recipe": option(str | None, None, "Name or file of a recipe; small on a GPU, laptop without one."),
    "store": option(Path | None, None, "A pair store; without it, random documents.", panel=_DATA),
    "length": option(int | None, None, "Tokens of every random document.", panel=_DATA, min=1),
    "lengths": option(str | None, None, "Shortest and longest random document; 4:64.", panel=_DATA),
    "vocabulary": option(int, 30522, "Of the random documents.", panel=_DATA, min=2),
    "channels": option(int, 32, "Of the random latents.", panel=_DATA, min=1),
    "documents": option(int | None, None, "How many random documents.", panel=_DATA, min=1),
    "steps": option(int, 20, "Timed steps, at least two blocks.", panel=_HOW, min=1),
    "warmup": option(
        int, 10, "Fewest steps before the clock; on a GPU it waits until they are steady.", panel=_HOW, min=1
    ),
    "block": option(int, 5, "Steps between two readings of the clock.", panel=_HOW, min=1),
    "repeats": option(int, 3, "Processes per arm.", panel=_HOW, min=1),
    "gate_steps": option(int, 10, "Steps of the loss gate; 0: no gate.", panel=_HOW, min=0),
    "tolerance": option(float, 0.01, "Largest loss difference that passes.", panel=_HOW, min=0.0),
    "timeout": option(float, 900.0, "Seconds for one process.", panel=_HOW, min=1.0),
    "memory_limit": option(str | None, None, "Such as 80GiB; of the GPU, or of the process on a CPU.", panel=_HOW),
    "seed": option(int, 0, "Of weights, order and noise.", panel=_HOW, min=0),
    "ladder": option(
        str | None, None, "full, short, plan (the steps of the users' plan) or none; short unless --arm.", panel=_ARMS
    ),
    "arm": option(Texts, None, "'name: section.key=value ...'; repeatable.", panel=_ARMS),
    "only": option(Texts, None, "Only this arm and the baseline; repeatable.", panel=_ARMS),
    "baseline": option(str | None, None, "The arm that the others are compared with.", panel=_ARMS),
    "fail_if": option(Texts, None, "Exit 1 if it holds: 'speedup(everything,baseline)<1.2'.", panel=_ARMS),
    "sweep": option(str | None, None, "Time and memory against one key: section.key=a,b,c.", panel=_SEARCH),
    "find_batch": option(bool, False, "Largest and fastest batch.", "--find-batch", panel=_SEARCH),
    "unit": option(int | None, None, "Batches are multiples of so many tokens.", panel=_SEARCH, min=1),
    "scaling": option(
        bool, False, "Predict the speed of many GPUs; under launch, measure it beside.", "--scaling", panel=_SEARCH
    ),
    "out": option(Path | None, None, "Folder of the report; benchmarks/<date-time>.", metavar="FOLDER"),
}  # fmt: skip


@takes(TABLE)
def benchmark(words: Any) -> None:
    """Measure speed-ups against the plain path in fresh processes, with noise, memory and a check of the loss."""
    from mmldlm.benchmark.arms import describe
    from mmldlm.benchmark.measuring import Options, parse_memory_limit
    from mmldlm.benchmark.session import (
        Session,
        Wanted,
        check_blocks,
        check_choices,
        find_store,
        on_gpu,
        scale,
    )

    arms, only, fail_if = words.arm or [], words.only or [], words.fail_if or []
    check_choices(
        words.ladder, words.sweep, find_batch=words.find_batch, scaling=words.scaling, fail_if=fail_if, arms=arms,
        only=only,
    )  # fmt: skip
    if not words.scaling:
        check_blocks(words.steps, words.block)
    limit = parse_memory_limit(words.memory_limit) if words.memory_limit else None
    settings = list(words.settings or [])
    gpu = on_gpu(words.recipe, settings)
    random_documents = partial(
        describe, words.length, words.lengths, words.vocabulary, words.channels, words.documents, words.seed
    )
    make_store = partial(find_store, words.store, settings, random_documents)
    path, synthetic = (Path(), None) if words.scaling else make_store()
    options = Options(
        recipe=words.recipe or ("small" if gpu else "laptop"), settings=tuple(settings), store=path,
        memory_limit=limit,
        **chosen(words, "steps warmup block repeats gate_steps tolerance timeout seed"),
    )  # fmt: skip
    folder = words.out or Path("benchmarks") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if words.scaling:
        if tables := scale(options, make_store, folder):  # the ranks that only help show nothing
            show_tables(tables, after=[f"report: {folder}"])
        return
    with ProgressBar("benchmark", unit="processes") as bar, terminated_as_interrupted():
        session = Session(options, folder, synthetic, bar.note, bar)
        if words.find_batch:
            finished = session.find_batch(arms, words.unit, gpu)
        elif words.sweep is not None:
            finished = session.sweep(words.sweep)
        else:
            finished = session.compare(Wanted(words.ladder, arms, only, words.baseline, fail_if), gpu)
    _show(finished, folder)


def _show(finished: Finished, folder: Path) -> None:
    from mmldlm.benchmark.comparison import Comparison
    from mmldlm.benchmark.report import compact
    from mmldlm.errors import Interrupted

    report, outcomes = finished.report, [outcome.line() for outcome in finished.outcomes]
    lines = [*report.remarks(finished.result), *outcomes, f"report: {folder}"]
    show_tables([compact(finished.table)], after=lines)
    if finished.result.partial:
        raise Interrupted(f"stopped; what was measured is in {folder}")
    if not any(trial.measurement for trial in report.bench.trials):
        typer.echo(f"mmldlm: nothing could be measured; the logs are in {report.bench.logs}", err=True)
        raise typer.Exit(1)
    compared = finished.result
    base = compared.row(compared.baseline) if isinstance(compared, Comparison) else None
    if base is not None and base.failure:
        typer.echo(f"mmldlm: {base.name}, the baseline, failed; its log is in {report.bench.logs}", err=True)
        raise typer.Exit(1)
    if base is not None and base.doubt:
        remedy = "try an idle machine, a larger --warmup, or a larger --block and --steps"
        typer.echo(f"mmldlm: {base.name}, the baseline, was not measured: {base.doubt}; {remedy}", err=True)
        raise typer.Exit(1)
    if any(outcome.failed for outcome in finished.outcomes):
        raise typer.Exit(1)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM keeps what was measured, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


VALIDATE = {
    "recipe": argument(str, ..., "Name of a recipe that comes with the package, or a YAML file."),
    "settings": argument(Texts, None, "section.key=value, any number."),
    "steps": option(
        int | None, None, "Steps of each path; 1,000 by default, at least 10.", show_default=False
    ),
    "long": option(bool, False, "10,000 steps.", "--long"),
    "out": option(
        Path | None, None, "New folder for runs and result; validations/<date-time>.", metavar="FOLDER"
    ),
}


@takes(VALIDATE)
def validate(words: Any) -> None:
    """Train the plain and the optimised path of a recipe, resume it, run it on two ranks; ticks and crosses.

    Exit code 1: a check failed.
    """
    from mmldlm.benchmark.validation import LONG, RESULT, STEPS, validate
    from mmldlm.errors import Interrupted, UserError

    if words.long and words.steps is not None:
        raise UserError(f"--long: has no use together with --steps {words.steps}; leave one of them out")
    steps = LONG if words.long else STEPS if words.steps is None else words.steps
    with ProgressBar("validate", unit="steps") as bar, terminated_as_interrupted():
        result = validate(
            words.recipe, overrides=words.settings or [], steps=steps, out=words.out, progress=bar
        )
    for check in result.checks:
        typer.echo(check.line())
    if result.partial:
        raise Interrupted(f"stopped before the last check; what is known is in {result.folder / RESULT}")
    failed = sum(check.passed is False for check in result.checks)
    outcome = f"{failed} of {len(result.checks)} checks failed" if failed else "no check failed"
    typer.echo(f"{outcome}; figures: {result.folder / RESULT}")
    if failed:
        raise typer.Exit(1)
