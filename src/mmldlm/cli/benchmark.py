"""`mmldlm benchmark`: what each speed-up is worth on this machine, and which batch to use."""

from __future__ import annotations

import contextlib
import datetime
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from mmldlm.benchmark.options import Options
    from mmldlm.benchmark.plan import Plan, Wanted
    from mmldlm.benchmark.report import Report, Result
    from mmldlm.benchmark.synthetic import Synthetic
    from mmldlm.benchmark.tables import Table
    from mmldlm.benchmark.trial import Bench

_DATA, _HOW, _ARMS, _SEARCH = "Documents", "How it is measured", "What is compared", "Instead of comparing"


def benchmark(
    settings: Annotated[
        list[str] | None, typer.Argument(help="section.key=value for every arm, any number.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Name or file of a recipe; small on a GPU, laptop without one.")
    ] = None,
    store: Annotated[
        Path | None, typer.Option(help="A pair store; without it, random documents.", rich_help_panel=_DATA)
    ] = None,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of every random document.", rich_help_panel=_DATA)
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(help="Shortest and longest random document; 4:64.", rich_help_panel=_DATA),
    ] = None,
    vocabulary: Annotated[int, typer.Option(min=2, rich_help_panel=_DATA)] = 30522,
    channels: Annotated[int, typer.Option(min=1, help="Of the random latents.", rich_help_panel=_DATA)] = 32,
    documents: Annotated[
        int | None, typer.Option(min=1, help="How many random documents.", rich_help_panel=_DATA)
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.", rich_help_panel=_HOW)] = 20,
    warmup: Annotated[
        int, typer.Option(min=1, help="Steps before the clock starts.", rich_help_panel=_HOW)
    ] = 10,
    block: Annotated[
        int, typer.Option(min=1, help="Steps between two looks at the clock.", rich_help_panel=_HOW)
    ] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="Processes per arm.", rich_help_panel=_HOW)] = 3,
    gate_steps: Annotated[
        int, typer.Option(min=0, help="Steps of the loss gate; 0: no gate.", rich_help_panel=_HOW)
    ] = 10,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest loss difference that passes.", rich_help_panel=_HOW)
    ] = 0.01,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for one process.", rich_help_panel=_HOW)
    ] = 900.0,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="Such as 80GiB; of the GPU, or of the process on a CPU.", rich_help_panel=_HOW),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_HOW)] = 0,
    ladder: Annotated[
        str | None,
        typer.Option(help="full, short or none; short unless --arm is given.", rich_help_panel=_ARMS),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(help="'name: section.key=value ...'; repeatable.", rich_help_panel=_ARMS),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only this arm and the baseline; repeatable.", rich_help_panel=_ARMS),
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The arm that the others are compared with.", rich_help_panel=_ARMS)
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Exit 1 if it holds: 'speedup(everything,baseline)<1.2'.", rich_help_panel=_ARMS),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option(help="Time and memory against one key: section.key=a,b,c.", rich_help_panel=_SEARCH),
    ] = None,
    find_batch: Annotated[
        bool, typer.Option("--find-batch", help="Largest and fastest batch.", rich_help_panel=_SEARCH)
    ] = False,
    unit: Annotated[
        int | None,
        typer.Option(min=1, help="Batches are multiples of so many tokens.", rich_help_panel=_SEARCH),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder of the report; benchmarks/<date-time>.")] = None,
) -> None:
    """Measure speed-ups against the plain path in fresh processes, with noise, memory and a check of the loss."""
    from mmldlm.benchmark.options import Options, parse_bytes
    from mmldlm.benchmark.plan import Wanted, find_store, on_gpu
    from mmldlm.benchmark.synthetic import describe

    _check_choices(ladder, sweep, find_batch, fail_if, arm, only)
    words = list(settings or [])
    gpu = on_gpu(recipe, words)
    limit = parse_bytes(memory_limit, "--memory-limit") if memory_limit else None
    path, synthetic = find_store(
        store, words, lambda: describe(length, lengths, vocabulary, channels, documents, seed)
    )
    options = Options(
        recipe=recipe or ("small" if gpu else "laptop"), settings=tuple(words), store=path, steps=steps, warmup=warmup,
        block=block, repeats=repeats, gate_steps=gate_steps, tolerance=tolerance, timeout=timeout,
        memory_limit=limit, seed=seed,
    )  # fmt: skip
    folder = out or Path("benchmarks") / datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    session = Session(options, folder, synthetic)
    if find_batch:
        session.find_batch(arm or [], unit, gpu)
    elif sweep is not None:
        session.sweep(sweep)
    else:
        session.compare(Wanted(ladder, arm or [], only or [], baseline, fail_if or []), gpu)


def _check_choices(
    ladder: str | None, sweep: str | None, find_batch: bool, fail_if: Any, arm: Any, only: Any
) -> None:
    """Options that would be ignored together are refused."""
    from mmldlm.benchmark.arms import LADDERS
    from mmldlm.errors import UserError

    if ladder is not None and ladder not in LADDERS:
        raise UserError(f"--ladder {ladder}: allowed are {', '.join(LADDERS)}")
    other = "--find-batch" if find_batch else "--sweep" if sweep is not None else None
    unused = {
        "--ladder": ladder,
        "--fail-if": fail_if,
        "--only": only,
        "--sweep": sweep if find_batch else None,
    }
    unused |= {"--arm": arm if other == "--sweep" else None}
    for option, value in unused.items():
        if other and value:
            raise UserError(f"{option}: has no use together with {other}; leave one of them out")


class Session:
    """One command: measures, shows and writes."""

    def __init__(self, options: Options, folder: Path, synthetic: Synthetic | None) -> None:
        from rich.console import Console

        self.options, self.folder, self.synthetic = options, folder, synthetic
        self.console, self.screen = Console(stderr=True), Console()
        if not self.screen.is_terminal:
            self.screen.width = 160  # a file or a pipe has no edge

    def compare(self, wanted: Wanted, gpu: bool) -> None:
        """Arms against a baseline."""
        from mmldlm.benchmark.conditions import judge
        from mmldlm.benchmark.ladder import compare
        from mmldlm.benchmark.plan import plan_comparison

        plan: Plan = plan_comparison(self.options, wanted, gpu)
        with self._measuring(plan.notes) as (bench, report):
            result = compare(bench, plan.arms, plan.baseline)
        outcomes = judge(plan.conditions, result)
        self._finish(report, result, outcomes)
        if any(outcome.failed for outcome in outcomes):
            raise typer.Exit(1)

    def sweep(self, text: str) -> None:
        """Time and memory against one key."""
        from mmldlm.benchmark.plan import plan_sweep
        from mmldlm.benchmark.sweep import sweep

        key, arms = plan_sweep(self.options, text, self.synthetic)
        with self._measuring([]) as (bench, report):
            result = sweep(bench, key, arms)
        self._finish(report, result, [])

    def find_batch(self, texts: list[str], unit: int | None, gpu: bool) -> None:
        """Largest and fastest batch under the memory limit."""
        from mmldlm.benchmark.find_batch import find_batch
        from mmldlm.benchmark.plan import describe_store, search_arm

        arm = search_arm(self.options, texts, gpu)
        longest = describe_store(self.options.store, self.synthetic)["max_length"]
        with self._measuring([]) as (bench, report):
            result = find_batch(bench, arm, unit or max(longest, 1024))
        self._finish(report, result, [])

    @contextlib.contextmanager
    def _measuring(self, notes: list[str]) -> Iterator[tuple[Bench, Report]]:
        from mmldlm.benchmark.environment import describe_environment
        from mmldlm.benchmark.plan import describe_store
        from mmldlm.benchmark.report import Report
        from mmldlm.benchmark.trial import Bench

        self.folder.mkdir(parents=True, exist_ok=True)
        with Progress(self.console) as progress, terminated_as_interrupted():
            bench = Bench(self.options, self.folder / "logs", self._say, progress.update)
            environment = describe_environment(["mmldlm", *sys.argv[1:]])
            report = Report(
                self.folder, bench, environment, describe_store(self.options.store, self.synthetic), notes
            )
            bench.after_trial = report.write_trials
            yield bench, report

    def _say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _finish(self, report: Report, result: Result, outcomes: list[Any]) -> None:
        from mmldlm.errors import Interrupted

        table = report.write(result, outcomes)
        _show(self.screen, table.compact())
        for line in [*report.remarks(result), *(outcome.line() for outcome in outcomes)]:
            self.screen.print(line, highlight=False, markup=False, soft_wrap=True)
        self.screen.print(f"report: {self.folder}", highlight=False, markup=False, soft_wrap=True)
        if result.partial:
            raise Interrupted(f"stopped; what was measured is in {self.folder}")
        if not any(trial.measurement for trial in report.bench.trials):
            self._say(f"mmldlm: nothing could be measured; the logs are in {report.bench.logs}")
            raise typer.Exit(1)


def _show(screen: Console, table: Table) -> None:
    from rich.table import Table as Drawn

    drawn = Drawn(box=None, pad_edge=False, header_style="bold")
    for idx, header in enumerate(table.headers):
        last = idx == len(table.headers) - 1
        drawn.add_column(header, justify="right" if _figures(table, idx) else "left", no_wrap=not last)
    for row in table.rows:
        drawn.add_row(*row)
    screen.print(drawn, highlight=False, markup=False)


def _figures(table: Table, column: int) -> bool:
    cells = [row[column] for row in table.rows if row[column]]
    return bool(cells) and all(cell[0].isdigit() for cell in cells)


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A polite end by the system keeps what was measured, as Ctrl-C does."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progress:
    """A bar in a terminal; lines for the processes that have ended are printed above it, or alone."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("benchmark"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False), console=console, disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int, name: str) -> None:
        """So many of all processes are done, and an arm is under way."""
        self._bar.update(self._task, completed=done, total=total, description=name)
