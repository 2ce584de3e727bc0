"""Measurements in fresh processes: what is asked (as JSON), what comes back, and how a process ended.

A sample is a list of processes, each a list of values, one per timed block. Blocks of one process are alike for
reasons that have nothing to do with the arm (memory layout, clock rate, neighbours), so the bootstrap draws
processes first and blocks inside them second.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mmldlm.benchmark.arms import Arm
from mmldlm.benchmark.machine import Failure, end, explain_death, start
from mmldlm.config import Config
from mmldlm.config.recipe import load_recipe
from mmldlm.errors import UserError
from mmldlm.json_lines import from_plain


@dataclass(frozen=True)
class Job:
    """One measurement in one process."""

    recipe: str
    settings: tuple[str, ...]
    """`section.key=value` words; later ones win."""
    steps: int
    """Timed steps; 0: none, only the losses."""
    warmup: int
    block: int
    """Steps between two looks at the clock."""
    gate_steps: int = 0
    """Steps at the start whose losses are read one by one; never timed."""
    memory_limit: int | None = None
    """Bytes: of the GPU, or of the process where there is none."""


@dataclass
class Block:
    """Some consecutive steps between two looks at the clock, the device idle at both."""

    steps: int = 0
    seconds: float = 0.0
    documents: int = 0
    tokens: int = 0
    """Real tokens, without padding."""
    places: int = 0
    """Room for tokens, padding included."""
    flops: float = 0.0
    """Of forward and backward, for real tokens."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass
class Memory:
    """Peak bytes."""

    allocated: int | None = None
    """On the GPU, in tensors; null without one."""
    reserved: int | None = None
    """On the GPU, taken by the allocator; null without one."""
    resident: int = 0
    """Of the process, on the host."""

    @property
    def peak(self) -> int:
        """The figure to compare: tensors on the GPU, else the process."""
        return self.resident if self.allocated is None else self.allocated


@dataclass
class Measurement:
    """What one process measured."""

    device: str
    precision: str
    attention: str
    compiled: bool
    set_up_seconds: float
    first_step_seconds: float = 0.0
    warmup_seconds: float = 0.0
    """The steps before the clock: compilation, caches, the steps of the loss gate and the held-out loss after them."""
    losses: list[float | None] = field(default_factory=list)
    """Of the first steps; null where a loss was not finite."""
    valid_loss: float | None = None
    """Held-out loss after them; null without a gate, or where it was not finite."""
    blocks: list[Block] = field(default_factory=list)
    memory: Memory = field(default_factory=Memory)
    data_wait: float = 0.0
    """Share of the timed steps in which the device waited for data."""
    warnings: list[str] = field(default_factory=list)
    """What the engine said, such as that it went on without a switch."""
    peak_flops: float | None = None
    """What the device could do per second in this precision; null where that is not known."""
    warmup_steps: int = 0
    """Until the time of a step had settled."""
    recorded: bool = False
    """CUDA graphs were recorded inside the timed blocks, however often these were repeated."""


_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class Options(Job):
    """How everything is measured; `settings` are for every arm, and an arm's own win."""

    store: Path
    repeats: int
    tolerance: float
    """Largest loss difference that passes the gate."""
    timeout: float
    """Seconds after which a process is given up."""
    seed: int

    def words(self, arm: Arm) -> tuple[str, ...]:
        """All settings of an arm, in the order in which they win."""
        return (
            f"train.seed={self.seed}",
            "batch.adapt=false",  # out of memory is an answer here
            *self.settings,
            f"data.store={self.store.absolute()}",
            *arm.settings,
        )

    def job(self, arm: Arm, *, timed: bool = True, gated: bool = False) -> Job:
        """The measurement of an arm."""
        steps, warmup = (self.steps, self.warmup) if timed else (0, 0)
        gate = self.gate_steps if gated else 0
        return Job(self.recipe, self.words(arm), steps, warmup, self.block, gate, self.memory_limit)

    def config(self, arm: Arm) -> Config:
        """The settings of an arm, resolved; a mistake in them names the arm."""
        try:
            return load_recipe(self.recipe, list(self.words(arm)))
        except UserError as error:
            raise UserError(f"arm {arm.name!r}: {error}") from error


def parse_bytes(text: str, option: str) -> int:
    """`80GiB` as a number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if not match or match[2] not in _UNITS or float(match[1]) <= 0:
        raise UserError(f"{option} {text}: write a number with a unit, such as 80GiB; units are "
                        f"{', '.join(unit for unit in _UNITS if unit)}")  # fmt: skip
    return int(float(match[1]) * _UNITS[match[2]])


_LEAST_LIMIT = 64 * 2**20
"""Bytes; no training fits into less, so a smaller number lacks its unit."""


def parse_memory_limit(text: str) -> int:
    """`--memory-limit` as a number of bytes."""
    limit = parse_bytes(text, "--memory-limit")
    if limit < _LEAST_LIMIT:
        raise UserError(
            f"--memory-limit {text}: is {limit:,} bytes; at least 64MiB are needed, such as 80GiB"
        )
    return limit


WORKER = "mmldlm.benchmark.worker"
Show = Callable[[str], None]
"""Called with a line for people."""


@dataclass
class Trial:
    """One process: which arm, and what came of it."""

    arm: str
    repeat: int
    settings: tuple[str, ...]
    seconds: float
    measurement: Measurement | None = None
    failure: Failure | None = None

    def line(self) -> str:
        if self.measurement is None:
            return f"{self.arm}: {self.failure.reason if self.failure else 'no result'}"
        peak = f"{self.measurement.memory.peak / 2**30:.2f} GiB, {self.seconds:.0f} s"
        if not self.measurement.blocks:
            return f"{self.arm}: {len(self.measurement.losses)} losses, {peak}"
        rate = statistics.median(block.tokens_per_second for block in self.measurement.blocks)
        return f"{self.arm}: {rate:,.0f} tokens/s, {peak}"


@dataclass
class Bench:
    """Runs trials and remembers them."""

    options: Options
    logs: Path
    """Folder for what the processes said."""
    show: Show
    progress: Callable[[int, int, str], None]
    """Called before each trial with the number done, the number of all, and what is measured now."""
    total: int = 0
    trials: list[Trial] = field(default_factory=list)
    after_trial: Callable[[], None] = lambda: None

    def run(self, arm: Arm, repeat: int = 0, *, timed: bool = True, gated: bool = False) -> Trial:
        job = self.options.job(arm, timed=timed, gated=gated)
        self.progress(len(self.trials), max(self.total, len(self.trials) + 1), arm.name)
        began = time.monotonic()
        outcome = run_job(job, self._log_path(arm, repeat), self.options.timeout)
        trial = Trial(arm.name, repeat, arm.settings, time.monotonic() - began)
        if isinstance(outcome, Failure):
            trial.failure = outcome
        else:
            trial.measurement = outcome
        self.trials.append(trial)
        self.show(f"{len(self.trials)} of {max(self.total, len(self.trials))}: {trial.line()}")
        self.after_trial()
        return trial

    def _log_path(self, arm: Arm, repeat: int) -> Path:
        self.logs.mkdir(parents=True, exist_ok=True)
        name = "".join(letter if letter.isalnum() else "-" for letter in arm.name)
        return self.logs / f"{len(self.trials):03d}-{name}-{repeat}.log"


def run_job(job: Job, log_path: Path, timeout: float) -> Measurement | Failure:
    """Run a job to its end. Ctrl-C ends the process with all its loaders and is passed on."""
    with tempfile.TemporaryDirectory(prefix="mmldlm-job-") as folder, open(log_path, "ab") as log:
        job_path, result_path = Path(folder) / "job.json", Path(folder) / "result.json"
        job_path.write_text(json.dumps(asdict(job)))
        process = start(WORKER, [str(job_path), str(result_path)], log)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return Failure("timeout", f"no result within {timeout:g} s; --timeout allows more")
        finally:
            end(process)
        return _read(result_path, code, log_path)


def _read(path: Path, code: int, log_path: Path) -> Measurement | Failure:
    if not path.is_file():
        return explain_death(code, log_path)
    result = json.loads(path.read_text())
    if "failure" in result:
        return Failure(**result["failure"])
    measurement: Measurement = from_plain(Measurement, result["measurement"])
    return measurement


NUM_RESAMPLES = 2000
Sample = list[list[float]]
"""Values of each block, for each process; every process has as many."""


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @property
    def variation(self) -> float:
        """How far the quartiles are apart, as a share of the median."""
        return (self.high - self.low) / self.median


@dataclass(frozen=True)
class Ratio:
    """A ratio of medians with the ends of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def margin(self) -> float:
        """The factor, at least 1, by which either end of the interval is away from "the same"."""
        return math.exp(max(abs(math.log(self.low)), abs(math.log(self.high))))


def spread(sample: Sample) -> Spread:
    """Median and quartiles over all blocks."""
    low, median, high = np.quantile(np.asarray(sample, dtype=np.float64), [0.25, 0.5, 0.75])
    return Spread(float(median), float(low), float(high))


def ratio(ours: Sample, theirs: Sample, seed: int) -> Ratio:
    """Median of ours over median of theirs; the interval is a percentile bootstrap over processes, then blocks."""
    rng = np.random.default_rng([seed, 0xBE])
    drawn = _medians(ours, rng) / _medians(theirs, rng)
    low, high = np.quantile(drawn, [0.025, 0.975])
    return Ratio(spread(ours).median / spread(theirs).median, float(low), float(high))


def _medians(sample: Sample, rng: np.random.Generator) -> np.ndarray:
    """Medians of resamples, each of as many processes as there are."""
    values = np.asarray(sample, dtype=np.float64)
    processes, blocks = values.shape
    chosen = rng.integers(processes, size=(NUM_RESAMPLES, processes, 1))
    drawn = values[chosen, rng.integers(blocks, size=(NUM_RESAMPLES, processes, blocks))]
    return np.median(drawn.reshape(NUM_RESAMPLES, -1), axis=1)
