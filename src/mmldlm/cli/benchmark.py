"""`mmldlm benchmark`: what speed-ups gain, and which batch to use; `mmldlm validate`: is the fast path right here?"""

from __future__ import annotations

import contextlib
import datetime
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmldlm.cli.terminal import ProgressBar

if TYPE_CHECKING:
    from mmldlm.benchmark.session import Finished, Scaled


def _option(help: str, panel: str | None = None, **limits: Any) -> Any:
    return typer.Option(help=help, rich_help_panel=panel, **limits)


_DATA, _HOW, _ARMS, _SEARCH = "Documents", "How it is measured", "What is compared", "Instead of comparing"
Settings = Annotated[list[str] | None, typer.Argument(help="section.key=value for every arm, any number.")]
Recipe = Annotated[str | None, _option("Name or file of a recipe; small on a GPU, laptop without one.")]
Store = Annotated[Path | None, _option("A pair store; without it, random documents.", _DATA)]
Length = Annotated[int | None, _option("Tokens of every random document.", _DATA, min=1)]
Lengths = Annotated[str | None, _option("Shortest and longest random document; 4:64.", _DATA)]
Vocabulary = Annotated[int, _option("Of the random documents.", _DATA, min=2)]
Channels = Annotated[int, _option("Of the random latents.", _DATA, min=1)]
Documents = Annotated[int | None, _option("How many random documents.", _DATA, min=1)]
Steps = Annotated[int, _option("Timed steps.", _HOW, min=1)]
Warmup = Annotated[
    int, _option("Fewest steps before the clock; on a GPU it waits until they are steady.", _HOW, min=1)
]
Block = Annotated[int, _option("Steps between two readings of the clock.", _HOW, min=1)]
Repeats = Annotated[int, _option("Processes per arm.", _HOW, min=1)]
GateSteps = Annotated[int, _option("Steps of the loss gate; 0: no gate.", _HOW, min=0)]
Tolerance = Annotated[float, _option("Largest loss difference that passes.", _HOW, min=0.0)]
Timeout = Annotated[float, _option("Seconds for one process.", _HOW, min=1.0)]
MemoryLimit = Annotated[str | None, _option("Such as 80GiB; of the GPU, or of the process on a CPU.", _HOW)]
Seed = Annotated[int, _option("Of weights, order and noise.", _HOW, min=0)]
Ladder = Annotated[
    str | None,
    _option("full, short, plan (the steps of the users' plan) or none; short unless --arm.", _ARMS),
]
ArmWords = Annotated[list[str] | None, _option("'name: section.key=value ...'; repeatable.", _ARMS)]
Only = Annotated[list[str] | None, _option("Only this arm and the baseline; repeatable.", _ARMS)]
Baseline = Annotated[str | None, _option("The arm that the others are compared with.", _ARMS)]
FailIf = Annotated[
    list[str] | None, _option("Exit 1 if it holds: 'speedup(everything,baseline)<1.2'.", _ARMS)
]
Sweep = Annotated[str | None, _option("Time and memory against one key: section.key=a,b,c.", _SEARCH)]
FindBatch = Annotated[
    bool, typer.Option("--find-batch", help="Largest and fastest batch.", rich_help_panel=_SEARCH)
]
Scaling = Annotated[
    bool,
    typer.Option(
        "--scaling",
        help="Predict the speed of many GPUs; under launch, measure it beside.",
        rich_help_panel=_SEARCH,
    ),
]
Unit = Annotated[int | None, _option("Batches are multiples of so many tokens.", _SEARCH, min=1)]
Out = Annotated[Path | None, _option("Folder of the report; benchmarks/<date-time>.")]


def benchmark(
    settings: Settings = None,
    recipe: Recipe = None,
    store: Store = None,
    length: Length = None,
    lengths: Lengths = None,
    vocabulary: Vocabulary = 30522,
    channels: Channels = 32,
    documents: Documents = None,
    steps: Steps = 20,
    warmup: Warmup = 10,
    block: Block = 5,
    repeats: Repeats = 3,
    gate_steps: GateSteps = 10,
    tolerance: Tolerance = 0.01,
    timeout: Timeout = 900.0,
    memory_limit: MemoryLimit = None,
    seed: Seed = 0,
    ladder: Ladder = None,
    arm: ArmWords = None,
    only: Only = None,
    baseline: Baseline = None,
    fail_if: FailIf = None,
    sweep: Sweep = None,
    find_batch: FindBatch = False,
    unit: Unit = None,
    scaling: Scaling = False,
    out: Out = None,
) -> None:
    """Measure speed-ups against the plain path in fresh processes, with noise, memory and a check of the loss."""
    from mmldlm.benchmark.arms import describe
    from mmldlm.benchmark.measuring import Options, parse_bytes
    from mmldlm.benchmark.session import Session, Wanted, check_choices, find_store, on_gpu, scale

    check_choices(ladder, sweep, find_batch=find_batch, scaling=scaling, fail_if=fail_if, arms=arm, only=only)
    words = list(settings or [])
    gpu = on_gpu(recipe, words)
    random_documents = partial(describe, length, lengths, vocabulary, channels, documents, seed)
    make_store = partial(find_store, store, words, random_documents)
    path, synthetic = (Path(), None) if scaling else make_store()
    options = Options(
        recipe=recipe or ("small" if gpu else "laptop"), settings=tuple(words), store=path, steps=steps, warmup=warmup,
        block=block, repeats=repeats, gate_steps=gate_steps, tolerance=tolerance, timeout=timeout, seed=seed,
        memory_limit=parse_bytes(memory_limit, "--memory-limit") if memory_limit else None,
    )  # fmt: skip
    folder = out or Path("benchmarks") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if scaling:
        _show_scaling(scale(options, make_store, folder))
        return
    with ProgressBar("benchmark", unit="processes") as bar, terminated_as_interrupted():
        session = Session(options, folder, synthetic, bar.note, bar)
        if find_batch:
            finished = session.find_batch(arm or [], unit, gpu)
        elif sweep is not None:
            finished = session.sweep(sweep)
        else:
            finished = session.compare(Wanted(ladder, arm or [], only or [], baseline, fail_if or []), gpu)
    _show(finished, folder)


def _show_scaling(scaled: Scaled | None) -> None:
    """Every table; the ranks that only help show nothing."""
    from rich.console import Console

    screen = Console()
    if not screen.is_terminal:
        screen.width = 160
    for table in scaled.tables if scaled else []:
        screen.print(table.to_rich(), highlight=False, markup=False)
    if scaled:
        screen.print(f"report: {scaled.folder}", highlight=False, markup=False, soft_wrap=True)


def _show(finished: Finished, folder: Path) -> None:
    from rich.console import Console

    from mmldlm.benchmark.report import compact
    from mmldlm.errors import Interrupted

    screen, report = Console(), finished.report
    if not screen.is_terminal:
        screen.width = 160  # a file or a pipe has no edge
    screen.print(compact(finished.table).to_rich(), highlight=False, markup=False)
    outcomes = [outcome.line() for outcome in finished.outcomes]
    for line in [*report.remarks(finished.result), *outcomes, f"report: {folder}"]:
        screen.print(line, highlight=False, markup=False, soft_wrap=True)
    if finished.result.partial:
        raise Interrupted(f"stopped; what was measured is in {folder}")
    if not any(trial.measurement for trial in report.bench.trials):
        typer.echo(f"mmldlm: nothing could be measured; the logs are in {report.bench.logs}", err=True)
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


def validate(
    recipe: Annotated[
        str, typer.Argument(help="Name of a recipe that comes with the package, or a YAML file.")
    ],
    settings: Annotated[list[str] | None, typer.Argument(help="section.key=value, any number.")] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps of each path; 1,000 by default, at least 10.", show_default=False),
    ] = None,
    long: Annotated[bool, typer.Option("--long", help="10,000 steps.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="New folder for runs and result; validations/<date-time>.")
    ] = None,
) -> None:
    """Train the plain and the optimised path of a recipe, resume it, run it on two ranks; ticks and crosses.

    Exit code 1: a check failed.
    """
    from mmldlm.benchmark.validation import LONG, RESULT, STEPS, validate
    from mmldlm.errors import Interrupted, UserError

    if long and steps is not None:
        raise UserError(f"--long: has no use together with --steps {steps}; leave one of them out")
    wanted = LONG if long else STEPS if steps is None else steps
    with ProgressBar("validate", unit="steps") as bar, terminated_as_interrupted():
        result = validate(recipe, overrides=list(settings or []), steps=wanted, out=out, progress=bar)
    for check in result.checks:
        typer.echo(check.line())
    if result.partial:
        raise Interrupted(f"stopped before the last check; what is known is in {result.folder / RESULT}")
    failed = sum(check.passed is False for check in result.checks)
    outcome = f"{failed} of {len(result.checks)} checks failed" if failed else "no check failed"
    typer.echo(f"{outcome}; figures: {result.folder / RESULT}")
    if failed:
        raise typer.Exit(1)
