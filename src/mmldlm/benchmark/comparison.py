"""A comparison of arms: rounds of fresh processes, then a row for each arm against the baseline and the noise."""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mmldlm.benchmark.arms import AGAIN, Arm, Expected, again, interleave, reference_settings
from mmldlm.benchmark.measuring import (
    Bench,
    Measurement,
    Ratio,
    Sample,
    Spread,
    Trial,
    parse_bytes,
    ratio,
    spread,
)
from mmldlm.errors import UserError
from mmldlm.statistics import SAME

FASTER, SLOWER = "faster", "slower"
MOST_VARIATION = 0.05
"""An arm whose blocks differ by more than this share was not measured."""
_UNTIMED = ("memory", "loss_difference")
"""Figures that are right however noisy the times are."""


def verdict(speedup: Ratio, noise: Ratio | None) -> str:
    """Faster or slower only where the whole interval lies beyond what an arm differs from itself."""
    margin = noise.margin if noise is not None else 1.0
    if speedup.low > margin:
        return FASTER
    if speedup.high < 1.0 / margin:
        return SLOWER
    return SAME


def loss_difference(losses: list[float | None], reference: list[float | None]) -> float:
    """Mean over the steps of |loss - reference| / |reference|; infinite where a loss was not finite."""
    pairs = list(zip(losses, reference, strict=True))
    if not pairs or any(ours is None or theirs is None for ours, theirs in pairs):
        return math.inf
    ours, theirs = np.asarray(pairs, dtype=np.float64).T
    return float(np.mean(np.abs(ours - theirs) / np.maximum(np.abs(theirs), np.finfo(np.float64).tiny)))


REFERENCE = "loss reference"
_MICRO_TOKENS = 8192
"""Size of the reference's micro-batches; it changes no loss, and the reference fits where the baseline does not."""


@dataclass
class Row:
    name: str
    change: str
    settings: tuple[str, ...] = ()
    failure: str | None = None
    tokens_per_second: Spread | None = None
    documents_per_second: float | None = None
    seconds_per_step: float | None = None
    speedup: Ratio | None = None
    """Tokens per second over those of the baseline; none where one of the two was not measured."""
    doubt: str = ""
    """Why times that were taken are not compared with others, if so."""
    verdict: str = ""
    memory: int | None = None
    """Peak bytes, the largest of the repeats."""
    memory_share: float | None = None
    """Of the baseline's memory."""
    expected: Expected | None = None
    """By the plan that the ladder climbs."""
    resident: int | None = None
    """Peak bytes of the process on the host."""
    set_up_seconds: float | None = None
    mfu: float | None = None
    data_wait: float | None = None
    """Share of the time in which the device waited for data."""
    fill: float | None = None
    """Share of the places that held real tokens."""
    warmup_seconds: float | None = None
    flops_per_step: float | None = None
    loss_difference: float | None = None
    valid_loss: float | None = None
    """Held-out loss after the steps of the loss gate."""
    valid_difference: float | None = None
    gate: str = ""
    """pass, fail, or why there is no answer."""
    warnings: list[str] = field(default_factory=list)
    """What the engine said while it was measured."""

    @property
    def unmeasured(self) -> str:
        """Why it has no times to compare; empty where it has."""
        return self.failure or self.doubt


@dataclass
class Comparison:
    """Arms, their rows, and what the rows are measured against."""

    arms: list[Arm]
    baseline: str
    rows: list[Row] = field(default_factory=list)
    noise: Ratio | None = None
    """The baseline against itself."""
    partial: bool = False

    def row(self, name: str) -> Row:
        return next(row for row in self.rows if row.name == name)


def compare(bench: Bench, arms: list[Arm], baseline: str) -> Comparison:
    """Measure all arms; Ctrl-C ends the measuring and keeps what there is."""
    first = next(arm for arm in arms if arm.name == baseline)
    ordered = [first, again(first), *(arm for arm in arms if arm is not first)]
    comparison = Comparison(ordered, baseline)
    reference = reference_arm(bench, ordered)
    if reference is not None:
        bench.total = 1
    try:
        if reference is not None:
            bench.run(reference, timed=False, gated=True)
        run_rounds(bench, ordered)
    except KeyboardInterrupt:
        comparison.partial = True
    comparison.rows, comparison.noise = summarise(bench, comparison)
    return comparison


def reference_arm(bench: Bench, arms: Iterable[Arm]) -> Arm | None:
    """The plain fp32 path in small micro-batches; none where no arm is to be gated."""
    if not bench.options.gate_steps or not any(arm.comparable for arm in arms):
        return None
    plain = Arm(REFERENCE, reference_settings())
    wanted = max(longest_document(bench.options.store), _MICRO_TOKENS)
    tokens = bench.options.config(plain).batch.tokens_per_step
    if tokens is not None and tokens <= wanted:
        return plain
    return Arm(REFERENCE, (*plain.settings, f"batch.micro_tokens={wanted}"))


def longest_document(store: Path) -> int:
    """Tokens of the longest document of a pair store."""
    from mmldlm.data.store import PairStore

    return int(max(split["max_length"] for split in PairStore.open(store).manifest.splits.values()))


def run_rounds(bench: Bench, arms: list[Arm]) -> None:
    """All arms that can run, once a round, in rotating order. An arm that died is not tried again."""
    arms = [arm for arm in arms if not arm.absent]
    repeats = bench.options.repeats
    bench.total += len(arms) * repeats
    dead: set[str] = set()
    for repeat in range(repeats):
        for arm in interleave(arms, repeat, repeats):
            if arm.name in dead:
                bench.total -= 1
                continue
            trial = bench.run(arm, repeat, gated=repeat == 0 and arm.comparable)
            if trial.failure is not None:
                dead.add(arm.name)


def summarise(bench: Bench, comparison: Comparison) -> tuple[list[Row], Ratio | None]:
    """Rows in the order of the arms, and the noise."""
    by_arm: dict[str, list[Trial]] = {arm.name: [] for arm in comparison.arms}
    reference: Measurement | None = None
    for trial in bench.trials:
        if trial.arm == REFERENCE:
            reference = trial.measurement
        else:
            by_arm[trial.arm].append(trial)
    rows = [row_of(arm, by_arm[arm.name]) for arm in comparison.arms]
    for row, arm in zip(rows, comparison.arms, strict=True):
        _gate(row, arm, by_arm[arm.name], reference, bench)
    samples = {name: _sample(trials) for name, trials in by_arm.items()}
    noise = _compare_speeds(rows, samples, comparison.baseline, bench.options.seed)
    return rows, noise


def _sample(trials: list[Trial]) -> Sample:
    return [
        [block.tokens_per_second for block in trial.measurement.blocks]
        for trial in trials
        if trial.measurement
    ]


def row_of(arm: Arm, trials: list[Trial]) -> Row:
    """What the trials of an arm come to, before it is compared with others."""
    row = Row(arm.name, arm.change, arm.settings, expected=arm.expected)
    failures = [trial.failure.reason for trial in trials if trial.failure]
    row.failure = failures[0] if failures else (None if trials else arm.absent or "not measured")
    measured = [trial.measurement for trial in trials if trial.measurement]
    if not measured:
        return row
    blocks = [block for one in measured for block in one.blocks]
    tokens, flops = sum(block.tokens for block in blocks), sum(block.flops for block in blocks)
    row.tokens_per_second = spread(_sample(trials))
    row.documents_per_second = (
        row.tokens_per_second.median * sum(block.documents for block in blocks) / tokens
    )
    row.seconds_per_step = spread([[block.seconds / block.steps for block in blocks]]).median
    row.memory = max(one.memory.peak for one in measured)
    row.resident = max(one.memory.resident for one in measured)
    row.set_up_seconds = statistics.median(one.set_up_seconds for one in measured)
    row.data_wait = statistics.median(one.data_wait for one in measured)
    row.warnings = list(dict.fromkeys(text for one in measured for text in one.warnings))
    row.fill = tokens / sum(block.places for block in blocks)
    row.warmup_seconds = statistics.median(one.warmup_seconds for one in measured)
    row.flops_per_step = flops / sum(block.steps for block in blocks)
    if measured[0].peak_flops:
        row.mfu = row.tokens_per_second.median * flops / tokens / measured[0].peak_flops
    row.doubt = _doubt(row.tokens_per_second, measured)
    return row


def _doubt(rate: Spread, measured: list[Measurement]) -> str:
    if any(one.recorded for one in measured):
        return "CUDA graphs were recorded while the clock ran"
    return f"it varies by {100 * rate.variation:.1f} %" if rate.variation > MOST_VARIATION else ""


def _gate(row: Row, arm: Arm, trials: list[Trial], reference: Measurement | None, bench: Bench) -> None:
    """The losses on the way and the held-out loss after it must both be near those of the reference."""
    measured = next((trial.measurement for trial in trials if trial.measurement), None)
    if not bench.options.gate_steps:
        row.gate = "off"
    elif not arm.comparable:
        row.gate = "does other work"
    elif reference is None:
        row.gate = "no reference"
    elif measured is not None and measured.losses:
        row.valid_loss = measured.valid_loss
        row.loss_difference = loss_difference(measured.losses, reference.losses)
        row.valid_difference = loss_difference([measured.valid_loss], [reference.valid_loss])
        worst = max(row.loss_difference, row.valid_difference)
        row.gate = "pass" if worst <= bench.options.tolerance else "fail"


def _compare_speeds(rows: list[Row], samples: dict[str, Sample], baseline: str, seed: int) -> Ratio | None:
    """Speed-ups and verdicts into the rows; the noise. Without a quiet baseline there is neither."""
    base, twin = next(row for row in rows if row.name == baseline), f"{baseline} {AGAIN}"
    # a noisy twin stays in: it can only widen the margin beyond which an arm is faster
    measured = not base.unmeasured
    noise = ratio(samples[twin], samples[baseline], seed) if measured and samples[twin] else None
    for row in rows:
        if not samples[row.name]:
            continue
        row.memory_share = row.memory / base.memory if row.memory and base.memory else None
        if row.unmeasured:
            row.verdict = f"not measured: {row.unmeasured}"
        elif not measured:
            row.verdict = "not compared: the baseline was not measured"
        elif row is base:
            row.speedup, row.verdict = Ratio(1.0, 1.0, 1.0), "baseline"
        else:
            row.speedup = ratio(samples[row.name], samples[baseline], seed)
            same = f"noise: {100 * (row.speedup.margin - 1):.1f} %"
            row.verdict = same if row.name == twin else verdict(row.speedup, noise)
    return noise


_WRITTEN = re.compile(r"\s*(\w+)\(([^()]*)\)\s*(<=|>=|<|>)\s*([\w.+-]+)\s*")
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def _tokens(row: Row) -> float | None:
    return row.tokens_per_second.median if row.tokens_per_second else None


FIGURES: dict[str, Callable[[Row], float | None]] = {
    "tokens_per_second": _tokens,
    "documents_per_second": lambda row: row.documents_per_second,
    "memory": lambda row: row.memory,
    "mfu": lambda row: row.mfu,
    "loss_difference": lambda row: row.loss_difference,
}
KNOWN = ("speedup(arm,arm)", *(f"{name}(arm)" for name in FIGURES))


@dataclass(frozen=True)
class Outcome:
    """What a condition came to."""

    text: str
    value: float | None
    failed: bool
    reason: str = ""
    """Why there is no value, if that is known."""

    def line(self) -> str:
        if self.value is None:
            return f"{self.text}: fails, because {self.reason or 'there is no such measurement'}"
        return (
            f"{self.text}: {'fails' if self.failed else 'condition not met'}, the value is {self.value:.4g}"
        )


@dataclass(frozen=True)
class Condition:
    """`figure(arm) < number`."""

    text: str
    figure: str
    arms: tuple[str, ...]
    sign: str
    limit: float

    def judge(self, comparison: Comparison) -> Outcome:
        """What it comes to; one that cannot be judged, because an arm gave no measurement, fails."""
        rows = [comparison.row(name) for name in self.arms]
        reasons = [f"{row.name} gave no measurement: {row.unmeasured}" for row in rows if row.unmeasured]
        if reasons and self.figure not in _UNTIMED:
            return Outcome(self.text, None, True, reasons[0])
        if self.figure == "speedup":
            ours, theirs = (_tokens(row) for row in rows)
            value = ours / theirs if ours and theirs else None
        else:
            value = FIGURES[self.figure](rows[0])
        return Outcome(self.text, value, value is None or _OPERATORS[self.sign](value, self.limit))


def parse_condition(text: str, arms: list[str]) -> Condition:
    """Read a condition; its arms must be among those that are measured."""
    match = _WRITTEN.fullmatch(text)
    if not match or (match[1] != "speedup" and match[1] not in FIGURES):
        raise UserError(
            f"--fail-if {text!r}: write a figure, a sign and a number, such as speedup(everything,baseline)<1.2; "
            f"figures are {', '.join(KNOWN)}"
        )
    names = tuple(name.strip() for name in match[2].split(","))
    wanted = 2 if match[1] == "speedup" else 1
    if len(names) != wanted:
        raise UserError(f"--fail-if {text!r}: {match[1]} takes {wanted} arms, here are {len(names)}")
    for name in names:
        if name not in arms:
            raise UserError(f"--fail-if {text!r}: no arm is called {name!r}; the arms are {', '.join(arms)}")
    return Condition(text, match[1], names, match[3], _limit(match[1], match[4], text))


def _limit(figure: str, word: str, text: str) -> float:
    if figure == "memory":
        return parse_bytes(word, f"--fail-if {text!r}:")
    try:
        return float(word)
    except ValueError:
        raise UserError(f"--fail-if {text!r}: {word!r} is no number") from None
