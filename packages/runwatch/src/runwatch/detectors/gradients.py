"""Gradients that are not finite, explode or vanish, and updates that were skipped because of them."""

from __future__ import annotations

import math
from collections import deque

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import Window, sureness
from runwatch.records import Record
from runwatch.settings import MonitorSettings


class Gradients(Detector):
    """M201, M202, M203."""

    needs = frozenset(("loss", "grad_norm"))

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.history = Window(settings.history_lines)
        self.bad_streak = self.small_streak = 0
        self.large: deque[bool] = deque(maxlen=10)
        self.usual_norm = self.first_loss = self.loss = 0.0

    def line(self, record: Record) -> None:
        loss, norm = record.values.get("loss"), record.values.get("grad_norm")
        if loss is not None and math.isfinite(loss):
            self.loss, self.first_loss = loss, self.first_loss or loss
        if norm is None:
            return
        if not math.isfinite(norm):
            self._nonfinite(f"grad_norm is {norm} at step {record.step}", record.step)
            return
        self.bad_streak = 0
        usual = self.history.median() if len(self.history) >= self.settings.warmup_lines else None
        if usual is not None:
            self.usual_norm = max(self.usual_norm, usual)
            self._exploding(norm, usual, record)
            self._vanishing(norm, record)
        if usual is None or norm <= self.settings.explosion_ratio * max(usual, 1e-30):
            self.history.add(norm)

    def event(self, record: Record) -> None:
        if record.event == "bad_gradient":
            self._nonfinite(record.text, record.step)
        elif record.event == "high_gradient":
            self.book.fire("M202", record.text, sure=0.8, step=record.step)

    def _nonfinite(self, evidence: str, step: int | None) -> None:
        self.bad_streak += 1
        level = "error" if self.bad_streak >= self.settings.nonfinite_streak else "warn"
        self.book.fire("M201", evidence, level=level, step=step)

    def _exploding(self, norm: float, usual: float, record: Record) -> None:
        ratio = norm / max(usual, 1e-30)
        limit = self.settings.explosion_ratio
        self.large.append(ratio > limit)
        if (self.large[-1] and sum(self.large) >= self.settings.explosion_lines) or ratio > 10 * limit:
            evidence = f"grad_norm {norm:.4g} at step {record.step}, usual {usual:.4g}"
            self.book.fire("M202", evidence, sure=sureness(ratio / limit))
        if len(self.large) == 10 and all(self.large):  # it stays there: that is its size now
            self.history.clear()
            self.large.clear()

    def _vanishing(self, norm: float, record: Record) -> None:
        small = norm < max(self.settings.vanishing_ratio * self.usual_norm, 1e-12)
        learned = abs(self.loss) < 0.05 * abs(
            self.first_loss
        )  # a loss near zero has small gradients by right
        self.small_streak = self.small_streak + 1 if small and not learned else 0
        if self.small_streak >= self.settings.vanishing_lines:
            evidence = f"grad_norm {norm:.3g} at step {record.step}, usual {self.usual_norm:.3g}, loss {self.loss:.3g}"
            self.book.fire("M203", evidence, sure=sureness(self.small_streak / self.settings.vanishing_lines))
        elif not small:
            self.book.clear("M203")


_SEARCH = 16
"""So many updates a loss scale of 2**16 may skip at the start until it has found its place."""


class SkippedUpdates(Detector):
    """M205."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.skips: deque[tuple[int, int]] = deque(maxlen=10_000)
        self.steps_seen = self.first_step = 0
        self.counted: int | None = None
        """Step whose skipped updates were counted last: log, ledger and text log tell of the same ones."""
        self.is_counter_logged = False
        """Whether lines count them, so that a message without a step tells nothing new."""

    def line(self, record: Record) -> None:
        skipped = record.values.get("skipped_steps")
        self.is_counter_logged = self.is_counter_logged or skipped is not None
        if record.step is not None:
            self.first_step = self.first_step or record.step
            self.steps_seen = record.step - self.first_step + 1
            if self.counted is not None and record.step < self.counted:
                self.counted = None
        if skipped and math.isfinite(skipped) and (record.step is None or record.step != self.counted):
            self.counted = record.step
            self._add(record.step, int(skipped), f"{skipped:.0f} updates skipped up to step {record.step}")

    def event(self, record: Record) -> None:
        """The ledger repeats what a line of our own log said; other trainers only have messages."""
        if record.event in ("rolled_back", "resumed", "started"):
            self.counted = None  # the same step may come again, and be another one
        if record.step is None and self.is_counter_logged:
            return
        if record.event == "skipped" and (record.step is None or record.step != self.counted):
            self.counted = record.step
            count = record.facts.get("count", 1)
            step = record.step if record.step is not None else self.book.step
            self._add(
                step, count if isinstance(count, int) else 1, record.text or f"updates skipped at step {step}"
            )

    def _add(self, step: int | None, count: int, evidence: str) -> None:
        at = step or 0
        self.skips.append((at, count))
        while self.skips and self.skips[0][0] < at - self.settings.skipped_window:
            self.skips.popleft()
        total = sum(number for _, number in self.skips)
        window = max(min(self.settings.skipped_window, self.steps_seen), 50)
        share = total / window
        grave = share > self.settings.skipped_share and total > _SEARCH
        text = f"{evidence}; {share:.1%} of the last {window} steps"
        sure = sureness(share / max(self.settings.skipped_share, 1e-9))
        self.book.fire("M205", text, level="warn" if grave else "info", sure=sure, step=step)
