"""Losses that are not finite, jump, rise for good, or no longer fall."""

from __future__ import annotations

import math

from mmldlm.diagnostics.monitor.alerts import AlertBook
from mmldlm.diagnostics.monitor.detectors.base import Detector, RunFacts
from mmldlm.diagnostics.monitor.history import Curve, Window, median, sureness
from mmldlm.diagnostics.monitor.records import LOSSES, Record
from mmldlm.diagnostics.monitor.settings import MonitorSettings


class NonfiniteLoss(Detector):
    """M101."""

    def line(self, record: Record) -> None:
        values = record.values
        for name in LOSSES:
            value = values.get(name)
            if value is not None and not math.isfinite(value):
                self.book.fire("M101", f"{name} is {value} at step {record.step}")
                return

    def event(self, record: Record) -> None:
        if record.event == "bad_loss":
            self.book.fire("M101", record.text, step=record.step)


class LossSpike(Detector):
    """M102. Spikes stay out of the baseline; a level that lasts for a whole window becomes the new baseline."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.history = Window(settings.history_lines)
        self.buckets: dict[str, list[Window]] = {}
        self.outliers = 0

    def line(self, record: Record) -> None:
        loss = record.values.get("loss")
        bucket_excess = self._bucket_excess(record)
        if loss is None or not math.isfinite(loss):
            return
        excess = self._excess(self.history, loss)
        if excess >= 1.0 and (bucket_excess is None or bucket_excess >= 1.0):
            usual, sure = self.history.median(), sureness(excess if bucket_excess is None else bucket_excess)
            where = "" if bucket_excess is None else ", in the median time bucket too"
            self.book.fire(
                "M102", f"loss {loss:.4g} at step {record.step}, usual {usual:.4g}{where}", sure=sure
            )
        if excess < 1.0 or self.outliers >= self.settings.history_lines:
            self.outliers = 0
            self.history.add(loss)
        else:
            self.outliers += 1

    def _excess(self, history: Window, value: float) -> float:
        """How many times the threshold is reached; below 1 is no spike."""
        if len(history) < self.settings.warmup_lines:
            return 0.0
        usual = history.median()
        rise = value - usual
        if rise <= self.settings.spike_rise * abs(usual):
            return 0.0
        by_noise = rise / (self.settings.spike_z * history.deviation())
        by_tail = rise / max(self.settings.spike_tail * (history.quantile(1.0) - usual), 1e-12)
        by_rise = rise / max(self.settings.spike_rise * abs(usual), 1e-12)
        return min(by_noise, by_tail, by_rise)

    def _bucket_excess(self, record: Record) -> float | None:
        """The median bucket's excess; None where no buckets are logged or they have no history yet."""
        found = []
        for name, values in record.lists.items():
            windows = self.buckets.setdefault(name, [])
            while len(windows) < len(values):
                windows.append(Window(self.settings.history_lines))
            for window, value in zip(windows, values, strict=False):
                if math.isfinite(value):
                    if len(window) >= self.settings.warmup_lines:
                        found.append(self._excess(window, value))
                    window.add(value)
        return median(found) if found else None


class Divergence(Detector):
    """M103."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.recent = Window(settings.divergence_lines)
        self.best, self.best_deviation, self.lines = math.inf, math.inf, 0

    def line(self, record: Record) -> None:
        loss = record.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        self.recent.add(loss)
        self.lines += 1
        if self.lines < self.settings.warmup_lines or len(self.recent) < self.settings.divergence_lines:
            return
        now = self.recent.median()
        if now < self.best:
            self.best, self.best_deviation = now, self.recent.deviation()
        elif now - self.best > self.settings.divergence_rise * abs(self.best):
            self._judge(now, record)
            return
        if self.book.is_open("M103") and now - self.best < 0.5 * self.settings.divergence_rise * abs(
            self.best
        ):
            self.book.clear("M103")

    def _judge(self, now: float, record: Record) -> None:
        noise = self.settings.spike_z * self.best_deviation / math.sqrt(self.settings.divergence_lines)
        if self.recent.quantile(0.2) - self.best > noise:
            rise = (now - self.best) / max(abs(self.best), 1e-12)
            evidence = f"median loss {now:.4g} up to step {record.step}, best was {self.best:.4g}"
            self.book.fire("M103", evidence, sure=sureness(1 + rise / self.settings.divergence_rise))


class Plateau(Detector):
    """M104. Says nothing at the end of a schedule, where a flat loss is what one wants."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.curve, self.lines, self.due = Curve(), 0, 3 * settings.plateau_lines
        self.peak_lr = self.lr = 0.0

    def line(self, record: Record) -> None:
        values = record.values
        if "lr" in values:
            self.lr = values["lr"]
            self.peak_lr = max(self.peak_lr, self.lr)
        loss = values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        self.curve.add(record.step or self.lines, loss)
        self.lines += 1
        if self.lines >= self.due:
            self.due = int(1.03 * self.lines) + 1
            self._judge(record)

    def _judge(self, record: Record) -> None:
        steps, losses = self.curve.points()
        third = losses[-(len(losses) // 3) :]
        first, last = median(third[: len(third) // 2]), median(third[len(third) // 2 :])
        flat = abs(first - last) < self.settings.plateau_gain * abs(first)
        if flat and not self._late(record):
            evidence = f"loss {last:.4g} since step {steps[-len(third)]:.0f}"
            self.book.fire("M104", evidence, sure=0.7)
        else:
            self.book.clear("M104")

    def _late(self, record: Record) -> bool:
        total = self.facts.total_steps
        over = bool(total and record.step is not None and record.step > 0.8 * total)
        return over or self.lr < self.settings.plateau_lr * self.peak_lr
