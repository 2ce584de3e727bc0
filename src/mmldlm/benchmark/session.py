"""One benchmark from its options to its report: a comparison of arms, a sweep, the search for a batch, or scaling."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmldlm.benchmark.arms import (
    BASELINE,
    LADDERS,
    Arm,
    Synthetic,
    again,
    ladder,
    make_store,
    parse_arm,
    plan_ladder,
    select,
)
from mmldlm.benchmark.comparison import (
    Condition,
    Outcome,
    compare,
    longest_document,
    parse_condition,
)
from mmldlm.benchmark.machine import describe_environment
from mmldlm.benchmark.measuring import Bench, Options, Show
from mmldlm.benchmark.report import FORMAT, Report, Result
from mmldlm.benchmark.scaling import (
    LINKS,
    SHAPES,
    Measured,
    measured_table,
    predict_all,
    predict_here,
    prediction_table,
    ring_bytes,
)
from mmldlm.benchmark.search import find_batch, parse_sweep, sweep, sweep_arms
from mmldlm.benchmark.worker import Drive, block_sizes, watch_exchanges
from mmldlm.config.recipe import load_recipe
from mmldlm.data.store import PairStore
from mmldlm.distributed.launch import read_place, start_ranks
from mmldlm.distributed.ranks import Ranks
from mmldlm.durable import replace_file, require_writable
from mmldlm.errors import UserError
from mmldlm.json_lines import encode
from mmldlm.reports import Table
from mmldlm.runtime import choose_device, start_runtime, synchronize
from mmldlm.training.setup import Setup, set_up


@dataclass(frozen=True)
class Wanted:
    """What is to be compared, as the user wrote it."""

    ladder: str | None = None
    """full, short, plan, none; null: short, or none with arms of one's own."""
    arms: list[str] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    baseline: str | None = None
    fail_if: list[str] = field(default_factory=list)


def check_choices(
    ladder: str | None,
    sweep: str | None,
    *,
    find_batch: bool,
    scaling: bool,
    fail_if: Any,
    arms: Any,
    only: Any,
) -> None:
    """Reject options that would be ignored together."""
    if ladder is not None and ladder not in LADDERS:
        raise UserError(f"--ladder {ladder}: allowed are {', '.join(LADDERS)}")
    other = (
        "--scaling" if scaling else "--find-batch" if find_batch else "--sweep" if sweep is not None else None
    )
    unused = {
        "--ladder": ladder,
        "--fail-if": fail_if,
        "--only": only,
        "--find-batch": find_batch and scaling,
        "--sweep": sweep if other != "--sweep" else None,
        "--arm": arms if other in ("--sweep", "--scaling") else None,
    }
    for option, value in unused.items():
        if other and value:
            raise UserError(f"{option}: has no use together with {other}; leave one of them out")


def check_blocks(steps: int, block: int) -> None:
    """Reject a single timed block: it never varies, so every difference would count."""
    if len(block_sizes(steps, block)) > 1:
        return
    smaller = f" or --block {steps // 2}" if steps > 1 else ""
    raise UserError(
        f"--steps {steps} --block {block}: is one timed block, which says nothing about noise; give at least two, "
        f"such as --steps {2 * block}{smaller}"
    )


def on_gpu(recipe: str | None, settings: list[str]) -> bool:
    """Whether the arms will run on a GPU. Other settings may need those of an arm to be complete."""
    device = [word for word in settings if word.startswith("train.device=")]
    config = load_recipe(recipe or "small", [*device, "data.store=."])
    return choose_device(config.train.device).type == "cuda"


def plan_comparison(options: Options, wanted: Wanted, gpu: bool) -> tuple[list[Arm], str, list[Condition]]:
    """Arms, baseline and conditions, all checked, so that a mistake costs nothing; arms that cannot run say why."""
    own = [parse_arm(text) for text in wanted.arms]
    kind = wanted.ladder or ("none" if own else "short")
    if kind == "plan":
        batch = options.config(Arm("recipe")).batch
        climbed = plan_ladder(batch, longest_document(options.store), gpu)
    else:
        climbed = ladder(kind, gpu)
    arms = [*climbed, *own]
    if not arms:
        raise UserError(
            "--ladder none: nothing is left to measure; give arms with --arm 'name: section.key=value'"
        )
    baseline = wanted.baseline or (BASELINE if kind != "none" else arms[0].name)
    chosen = select(arms, wanted.only, baseline)
    for arm in chosen:
        options.config(arm)
    chosen = [
        replace(arm, absent="not run: needs a GPU") if arm.gpu_only and not gpu else arm for arm in chosen
    ]
    names = [arm.name for arm in chosen if not arm.absent]
    if baseline not in names:
        raise UserError(f"--baseline {baseline}: this arm needs a GPU, and there is none; choose another")
    names.append(again(next(arm for arm in chosen if arm.name == baseline)).name)
    return chosen, baseline, [parse_condition(text, names) for text in wanted.fail_if]


def plan_sweep(options: Options, text: str, synthetic: Synthetic | None) -> tuple[str, list[Arm]]:
    """The key and an arm for each of its values, checked."""
    key, values = parse_sweep(text)

    def make(name: str, value: int) -> Path:
        if synthetic is None:
            raise UserError(f"--sweep {text}: {name} needs a synthetic store; leave out --store")
        field_values = (
            {"min_length": value, "max_length": value} if name == "length" else {"documents": value}
        )
        return make_store(replace(synthetic, **field_values))

    arms = sweep_arms(key, values, make)
    for arm in arms:
        options.config(arm)
    return key, arms


def describe_store(path: Path, synthetic: Synthetic | None) -> dict[str, Any]:
    """What the report says about the documents."""
    manifest = PairStore.open(path).manifest
    train = manifest.splits["train"]
    return {
        "store": str(path),
        "synthetic": asdict(synthetic) if synthetic else None,
        "documents": train["num_documents"],
        "mean_length": train["num_tokens"] / train["num_documents"],
        "max_length": max(split["max_length"] for split in manifest.splits.values()),
        "vocabulary": manifest.vocab_size,
        "slots": manifest.num_slots,
        "channels": manifest.num_channels,
    }


def find_store(
    store: Path | None, settings: list[str], describe: Callable[[], Synthetic]
) -> tuple[Path, Synthetic | None]:
    """A real store, or a synthetic one that is made now if it is not there yet."""
    for word in settings:
        if word.startswith("data.store="):
            raise UserError(f"{word}: a benchmark takes its store from --store {word.partition('=')[2]}")
    if store is not None:
        PairStore.open(store)
        return store, None
    synthetic = describe()
    return make_store(synthetic), synthetic


def search_arm(options: Options, texts: list[str], gpu: bool) -> Arm:
    """The settings whose batch is searched for: those of the recipe, or one arm of one's own."""
    if len(texts) > 1:
        raise UserError(
            f"--find-batch: searches for one arm, {len(texts)} were given; leave out --arm {texts[1]!r}"
        )
    if not gpu and options.memory_limit is None:
        raise UserError(
            "--find-batch: without a GPU nothing rejects a batch; give a limit, such as --memory-limit 4GiB"
        )
    arm = parse_arm(texts[0]) if texts else Arm("as the recipe says")
    options.config(arm)
    return arm


@dataclass(frozen=True)
class Finished:
    """What a benchmark measured and wrote."""

    result: Result
    report: Report
    table: Table
    outcomes: list[Outcome] = field(default_factory=list)


@dataclass
class Session:
    """Where the report goes, and who is told meanwhile."""

    options: Options
    folder: Path
    synthetic: Synthetic | None
    show: Show
    progress: Callable[[int, int, str], None]

    def compare(self, wanted: Wanted, gpu: bool) -> Finished:
        arms, baseline, conditions = plan_comparison(self.options, wanted, gpu)
        report = self._report()
        result = compare(report.bench, arms, baseline)
        outcomes = [condition.judge(result) for condition in conditions]
        return Finished(result, report, report.write(result, outcomes), outcomes)

    def sweep(self, text: str) -> Finished:
        key, arms = plan_sweep(self.options, text, self.synthetic)
        report = self._report()
        result = sweep(report.bench, key, arms)
        return Finished(result, report, report.write(result, []))

    def find_batch(self, texts: list[str], unit: int | None, gpu: bool) -> Finished:
        arm = search_arm(self.options, texts, gpu)
        report = self._report()
        result = find_batch(report.bench, arm, unit or max(report.data["max_length"], 1024))
        return Finished(result, report, report.write(result, []))

    def _report(self) -> Report:
        require_writable(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(self.options, self.folder / "logs", self.show, self.progress)
        environment = describe_environment()
        report = Report(self.folder, bench, environment, describe_store(self.options.store, self.synthetic))
        bench.after_trial = report.write_trials
        return report


_AGREEMENT = 4096
"""Bytes below which an exchange is an agreement between hosts."""


def measure_ranks(setup: Setup, folder: Path, steps: int, warmup: int) -> Measured:
    """Time steps with exchanges and without them in turn, and the exchanges alone; called by all ranks together."""
    ranks, kind, drive = setup.ranks, setup.config.distributed.parallel, Drive(setup, folder, None)
    together, alone = [], []
    try:
        drive.block(max(warmup, 4))  # by then the exchanges of a step are known
        with watch_exchanges() as seen:
            drive.block(1)
        for _ in range(steps):
            ranks.barrier()
            together.append(drive.block(1))
            with watch_exchanges(leave_out=True):
                alone.append(drive.block(1).seconds)
    finally:
        drive.close()
    large = [one for one in seen if one.sent > _AGREEMENT]
    communication = _timed(ranks, *(one.repeat for one in large))
    agreement, bandwidth = _timed(ranks, ranks.barrier), _bandwidth(ranks)
    seconds = ranks.total(statistics.median(block.seconds for block in together)) / ranks.world_size
    own = statistics.median(alone)
    mean, slowest = ranks.total(own) / ranks.world_size, ranks.largest(round(own * 1e6)) / 1e6
    hidden = 1.0 - min(1.0, max(0.0, seconds - mean) / communication) if large else 1.0
    return Measured(
        kind, ranks.world_size, ranks.world_size // ranks.local_world_size,
        sum(block.tokens for block in together) / len(together) / seconds, seconds, mean, slowest, mean / seconds,
        {name: sum(one.kind == name for one in large) for name in sorted({one.kind for one in large})},
        sum(one.sent for one in large), communication, hidden, len(seen) - len(large), agreement, bandwidth,
        predict_here(setup, mean, bandwidth, _bandwidth_inside(ranks) or bandwidth, agreement),
    )  # fmt: skip


def _bandwidth(ranks: Ranks, group: Any = None) -> float:
    """Bytes a second that a rank sends in a plain sum of 16 MiB over a group, or over all."""
    words = torch.zeros(2**22, device=ranks.device)
    sent = ring_bytes(4 * words.numel(), dist.get_world_size(group), 2)
    return sent / _timed(ranks, lambda: dist.all_reduce(words, group=group))


def _bandwidth_inside(ranks: Ranks) -> float | None:
    """The same among the ranks of one node, all nodes at once; None where that is no other group."""
    if ranks.local_world_size in (1, ranks.world_size):
        return None
    return _bandwidth(ranks, dist.new_subgroups(ranks.local_world_size)[0])


def _timed(ranks: Ranks, *work: Callable[[], Any], repeats: int = 5) -> float:
    """Median seconds, on the slowest rank, after one time to warm up."""
    seconds = []
    for _ in range(repeats + 1):
        ranks.barrier()
        began = time.perf_counter()
        for part in work:
            part()
        synchronize(ranks.device)
        seconds.append(time.perf_counter() - began)
    return ranks.largest(round(statistics.median(seconds[1:]) * 1e9)) / 1e9


def scale(
    options: Options, make_store: Callable[[], tuple[Path, Synthetic | None]], folder: Path
) -> list[Table] | None:
    """Predict, measure where several ranks were started, and write `result.json`; the tables, on the main rank."""
    require_writable(folder)
    if read_place(os.environ).world_size == 1:
        return _write_scaling(folder, options, None, None)
    with (
        start_ranks(options.config(Arm("scaling"))) as ranks,
        tempfile.TemporaryDirectory(prefix="mmldlm-scaling-") as own,
    ):
        if ranks.main:
            make_store()  # before the others look for it
        ranks.barrier()
        path, synthetic = make_store()
        config = replace(options, store=path).config(Arm("scaling"))
        runtime = start_runtime(config, ranks.local_world_size, ranks.device)
        setup = set_up(config, runtime, ranks)
        measured = measure_ranks(setup, Path(own) / "run", options.steps, options.warmup)
        data = describe_store(path, synthetic)
        return _write_scaling(folder, options, measured, data) if ranks.main else None


def _write_scaling(
    folder: Path, options: Options, measured: Measured | None, data: dict[str, Any] | None
) -> list[Table]:
    rows = predict_all()
    tables = [prediction_table(rows, link) for link in LINKS] + (
        [measured_table(measured)] if measured else []
    )
    folder.mkdir(parents=True, exist_ok=True)
    whole = {
        "format": FORMAT, "kind": "scaling", "partial": False, "predicted": rows,
        "clusters": {name: asdict(cluster) for name, cluster in LINKS.items()},
        "shapes": [asdict(shape) for shape in SHAPES], "measured": asdict(measured) if measured else None,
        "environment": describe_environment(), "options": asdict(options), "data": data,
    }  # fmt: skip
    replace_file(folder / "result.json", encode(whole, indent=1))
    replace_file(folder / "table.md", "\n".join(table.to_markdown() for table in tables).encode())
    return tables
