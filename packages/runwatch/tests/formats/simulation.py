"""A simulated training: the curve of a scenario, and the log that a trainer's writer makes of it.

Nothing here is shared with the monitor. A writer gets a `Run` and a `Log`, writes what the real program would print and
records in the log what a reader of it should find: last step, last loss, rate.
"""

import hashlib
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta

NAN = float("nan")
TEXT_SCENARIOS = ("healthy", "ended", "nan", "diverging", "memory", "hung")
TABLE_SCENARIOS = ("healthy", "ended", "nan", "diverging")


@dataclass(frozen=True)
class Point:
    """One thing a trainer reports: an interval of steps, or an epoch."""

    idx: int
    loss: float
    valid_loss: float
    accuracy: float
    grad_norm: float
    lr_share: float
    pace: float
    """Duration of this interval relative to the usual one."""
    seconds: float
    """Elapsed at the end of this interval, for an interval of one second."""
    draw: float
    """A uniform number, for what else a trainer prints."""


class Run:
    """What happens in one training; `points` gives its curve."""

    def __init__(self, trainer: str, scenario: str):
        seed = hashlib.sha1(f"{trainer}/{scenario}".encode()).hexdigest()
        self.trainer = trainer
        self.scenario = scenario
        self.random = random.Random(int(seed[:12], 16))
        self.began = datetime(2026, 3, 2, 10, 15, 7) + timedelta(minutes=self.random.randrange(600))

    @property
    def finished(self) -> bool:
        """Whether the trainer got to its last step (a diverging one does)."""
        return self.scenario in ("healthy", "diverging", "nan")

    def at(self, seconds: float) -> datetime:
        return self.began + timedelta(seconds=seconds)

    def points(self, num: int, start: float = 10.8, floor: float = 3.1, noise: float = 0.02) -> list[Point]:
        """The reported intervals of a training that was planned to have `num` of them."""
        end = num if self.finished else int(0.62 * num)
        elapsed = 0.0
        curve = []
        for idx in range(end):
            share = (idx + 0.5) / num
            pace = max(0.5, self.random.gauss(1.0, 0.02)) * (1.8 if idx == 0 else 1.0)
            elapsed += pace
            loss = self._loss(share, start, floor) * math.exp(self.random.gauss(0.0, noise))
            valid = self._loss(share, start, floor) * 1.03 * math.exp(self.random.gauss(0.0, noise / 4))
            if self.scenario == "nan" and share > 0.7:
                loss = valid = NAN
            curve.append(
                Point(
                    idx,
                    loss,
                    valid,
                    self._accuracy(share),
                    self._grad_norm(share, loss),
                    _lr_share(share),
                    pace,
                    elapsed,
                    self.random.random(),
                )
            )
        return curve

    def _loss(self, share: float, start: float, floor: float) -> float:
        healthy = floor + (start - floor) * math.exp(-5.0 * share**0.8)
        if self.scenario != "diverging" or share < 0.5:
            return healthy
        rise = min(1.0, (share - 0.5) / 0.2)
        return healthy * (1 - rise) + rise * (start + 3.0 * (start - floor) * (1 + 0.3 * rise))

    def _accuracy(self, share: float) -> float:
        broken = self.scenario in ("nan", "diverging") and share > 0.7
        return (
            0.1
            if broken
            else min(0.99, 0.1 + 0.75 * (1 - math.exp(-4.0 * share)) + self.random.gauss(0.0, 0.004))
        )

    def _grad_norm(self, share: float, loss: float) -> float:
        if math.isnan(loss):
            return NAN
        wild = 6.0 if self.scenario == "diverging" and share > 0.5 else 1.0
        return wild * (0.45 + 1.6 * math.exp(-8.0 * share)) * math.exp(self.random.gauss(0.0, 0.08))


def _lr_share(share: float) -> float:
    """Linear warm-up over 3 % of the run, then a cosine to a tenth."""
    if share < 0.03:
        return share / 0.03
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (share - 0.03) / 0.97))


@dataclass
class Log:
    """The text of a log, and what a reader should find in it."""

    parts: list[str] = field(default_factory=list)
    steps: tuple[float, ...] = ()
    """Acceptable last steps; none if the log gives no step."""
    step_tolerance: float = 0.0
    """Relative; above 0 where an epoch's length is not in the log and the step can only be estimated."""
    losses: tuple[float, ...] = ()
    """Acceptable last losses (the last interval's, a mean printed after it)."""
    tolerance: float = 0.01
    rate: float | None = None
    """Printed rate in its own unit (tokens, samples, iterations per second)."""

    def line(self, text: str = "") -> None:
        self.parts.append(text + "\n")

    def lines(self, *texts: str) -> None:
        for text in texts:
            self.line(text)

    def bar(self, text: str) -> None:
        """A state of a progress bar, which replaces the one before."""
        self.parts.append("\r" + text)

    def block(self, text: str) -> None:
        """Several lines, indented as in the source that calls this."""
        rows = text.strip("\n").split("\n")
        indent = min(len(row) - len(row.lstrip()) for row in rows if row.strip())
        self.parts.extend(row[indent:] + "\n" for row in rows)

    @property
    def text(self) -> str:
        return "".join(self.parts)


Writer = Callable[[Run, Log], None]


@dataclass(frozen=True)
class Trainer:
    """A program whose log is imitated, and where its format was read."""

    name: str
    source: str
    """Repository and path."""
    statement: str
    """The format, in a line."""
    write: Writer
    file_name: str = "train.log"
    errors: str | None = "torch"
    """Whose failure messages end in this log; None for files of metrics alone."""
    has_loss: bool = True
    """False where the program prints no loss: nobody can judge such a log."""
    filters_nan: bool = False
    """True where a NaN loss is not printed as such: it becomes 0, or is left out."""
    may_warn: tuple[str, ...] = ()
    """Codes that a healthy log of this trainer may raise with good reason."""

    @property
    def held_out(self) -> bool:
        return is_held_out(self.name)

    @property
    def scenarios(self) -> tuple[str, ...]:
        return TABLE_SCENARIOS if self.errors is None else TEXT_SCENARIOS


def is_held_out(name: str) -> bool:
    """The fixed split: an odd last digit of the SHA-1 of the name."""
    return int(hashlib.sha1(name.encode()).hexdigest()[-1], 16) % 2 == 1


class Registry(list[Trainer]):
    """The trainers of one module, filled by the decorator `add`."""

    def add(self, name: str, source: str, statement: str, **options) -> Callable[[Writer], Writer]:
        def register(write: Writer) -> Writer:
            self.append(Trainer(name, source, statement, write, **options))
            return write

        return register
