"""Learning rates that are zero, jump, never stop warming up, or end too early."""

from __future__ import annotations

import math

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.records import Record
from runwatch.settings import MonitorSettings


class LearningRate(Detector):
    """M204, one alert per mistake (the subject)."""

    needs = frozenset(("lr",))

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.peak, self.last, self.zeros, self.falling, self.lines = 0.0, math.nan, 0, 0, 0
        self.last_used, self.last_step = 0.0, 0

    def line(self, record: Record) -> None:
        lr = record.values.get("lr")
        if lr is None:
            return
        if not math.isfinite(lr) or lr < 0:
            self.book.fire("M204", f"lr is {lr} at step {record.step}", subject="invalid")
            return
        self.lines += 1
        if record.step is not None:
            if record.step < self.last_step:  # a rollback or resume took the schedule back as well
                self.falling = 0
            self.last_step = record.step
        self._zero(lr, record)
        self._jump(lr, record)
        self._schedule(lr, record)
        self.falling = self.falling + 1 if lr < self.last else 0 if lr > self.last else self.falling
        self.peak, self.last, self.last_used = max(self.peak, lr), lr, lr or self.last_used

    def _progress(self, record: Record) -> float | None:
        total = self.facts.total_steps
        return record.step / total if total and record.step is not None and record.step <= total else None

    def _zero(self, lr: float, record: Record) -> None:
        """A rate that decays to 0 at the end of a schedule passes; one that is 0 before does not."""
        self.zeros = self.zeros + 1 if lr == 0 else 0
        progress = self._progress(record)
        # in stages it falls seldom, but far
        share = 0.1 if self.falling >= self.settings.warmup_lines else 0.01
        decayed = self.last_used < share * self.peak
        ending = decayed and (progress is None or progress > self.settings.lr_early)
        if self.zeros >= self.settings.lr_zero_lines and not ending:
            self.book.fire(
                "M204", f"lr is 0 at step {record.step}, for {self.zeros} lines", subject="zero", sure=0.95
            )
        elif lr > 0:
            self.book.clear("M204", "zero")

    def _jump(self, lr: float, record: Record) -> None:
        """Up after it had been falling: a schedule that started over, as after a resume without its state."""
        if self.facts.lr_restarts:
            return
        if self.falling >= 3 and self.last > 0 and lr > self.settings.lr_jump * self.last:
            evidence = f"lr from {self.last:.3g} to {lr:.3g} at step {record.step}, after it had been falling"
            self.book.fire("M204", evidence, subject="jump", sure=0.9)
        elif self.lines % (10 * self.settings.resolve_lines) == 0:
            self.book.clear("M204", "jump")

    def _schedule(self, lr: float, record: Record) -> None:
        progress = self._progress(record)
        if progress is None or self.lines < self.settings.warmup_lines:
            return
        if progress > 0.5 and self.falling == 0 and lr > 1.0001 * self.last and lr >= self.peak:
            self.book.fire(
                "M204",
                f"lr still rises at {progress:.0%} of the steps ({lr:.3g})",
                subject="warmup",
                sure=0.9,
            )
        early = progress < self.settings.lr_early and not self.facts.lr_restarts
        if early and 0 < lr < 0.01 * self.peak and self.falling:
            evidence = (
                f"lr is {lr:.3g}, under 1 % of its peak {self.peak:.3g}, at {progress:.0%} of the steps"
            )
            self.book.fire("M204", evidence, subject="early", sure=0.85)
