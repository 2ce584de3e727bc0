"""Losses that are not finite, jump, rise for good, or no longer fall."""

from __future__ import annotations

import math

from mmldlm.diagnostics.monitor.alerts import AlertBook
from mmldlm.diagnostics.monitor.detectors.base import Detector, RunFacts
from mmldlm.diagnostics.monitor.history import Curve, Window, median, spread, sureness
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


class _Baseline:
    """History of one loss. Spikes stay out of it; a level that lasts for a whole window becomes the new one."""

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings, self.history, self.outliers = settings, Window(settings.history_lines), 0
        self.largest = self.tail = 0.0
        """Largest rise that was no spike, as a share of the usual value; forgotten much more slowly than the window."""

    def judge(self, value: float) -> float:
        """How many times the threshold of a spike is reached (0.0 without enough history), then take it in."""
        usual = self.history.median()
        self.largest = max(self.largest, abs(value)) if len(self.history) < 5 else self.largest
        size = max(abs(usual), 0.01 * self.largest, 1e-12)  # once a loss is near 0, doubling means nothing
        excess = self._excess(value - usual, size)
        self.outliers = self.outliers + 1 if excess >= 1.0 else 0
        if excess < 1.0 or self.outliers > self.settings.history_lines:
            if len(self.history) >= 5:
                self.tail = max(0.999 * self.tail, (value - usual) / size)
            self.history.add(value)
        return excess

    def _excess(self, rise: float, size: float) -> float:
        settings, history = self.settings, self.history
        if len(history) < settings.warmup_lines:
            return 0.0
        if rise <= settings.spike_rise * size:
            return 0.0
        by_noise = rise / (settings.spike_z * history.deviation())
        by_tail = rise / max(settings.spike_tail * self.tail * size, 1e-12)
        return min(by_noise, by_tail, rise / max(settings.spike_rise * size, 1e-12))


class LossSpike(Detector):
    """M102."""

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.loss = _Baseline(settings)
        self.buckets: dict[str, list[_Baseline]] = {}

    def line(self, record: Record) -> None:
        in_buckets = self._bucket_excess(record) if record.lists else None
        loss = record.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        usual, excess = self.loss.history.median(), self.loss.judge(loss)
        if excess >= 1.0 and (in_buckets is None or in_buckets >= 1.0):
            where = "" if in_buckets is None else ", in most time buckets too"
            evidence = f"loss {loss:.4g} at step {record.step}, usual {usual:.4g}{where}"
            self.book.fire("M102", evidence, sure=sureness(excess))

    def _bucket_excess(self, record: Record) -> float | None:
        """The median bucket's excess of the worse modality; None where the buckets have no history yet."""
        found = []
        for name, values in record.lists.items():
            baselines = self.buckets.setdefault(name, [])
            baselines += [_Baseline(self.settings) for _ in values[len(baselines) :]]
            pairs = [
                (one, value) for one, value in zip(baselines, values, strict=False) if math.isfinite(value)
            ]
            ready = [len(one.history) >= self.settings.warmup_lines for one, _ in pairs]
            excesses = [one.judge(value) for one, value in pairs]
            if any(ready):
                found.append(median(excesses))
        return max(found, default=None)


class Divergence(Detector):
    """M103. Against the best median of a whole history window: the best of short ones would be a lucky draw."""

    compares = True

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.recent, self.history = Window(settings.divergence_lines), Window(settings.history_lines)
        self.best, self.best_deviation, self.start, self.lines = math.inf, math.inf, math.inf, 0

    def line(self, record: Record) -> None:
        loss = record.values.get("loss")
        if loss is None or not math.isfinite(loss):
            return
        self.recent.add(loss)
        self.history.add(loss)
        self.lines += 1
        if self.lines <= 3:
            self.start = min(self.start, loss)
        if len(self.recent) < self.settings.divergence_lines or self._worse_than_at_start(record):
            return
        if len(self.history) < self.settings.warmup_lines:
            return
        if (median := self.history.median()) < self.best:
            self.best, self.best_deviation = median, self.history.deviation()
        self._judge(record)

    def _worse_than_at_start(self, record: Record) -> bool:
        """A run that explodes in its first lines has no good history to be compared with."""
        now, limit = self.recent.median(), self.settings.divergence_start * self.start
        if not 0 < limit < now:
            return False
        evidence = f"median loss {now:.4g} up to step {record.step}, at the start it was {self.start:.4g}"
        self.book.fire("M103", evidence, sure=sureness(now / limit))
        return True

    def _judge(self, record: Record) -> None:
        now, best = self.recent.median(), self.best
        limit = self.settings.divergence_rise * abs(best)
        noise = self.settings.spike_z * self.best_deviation / math.sqrt(self.settings.divergence_lines)
        if now - best > limit and self.recent.quantile(0.2) - best > noise:
            evidence = f"median loss {now:.4g} up to step {record.step}, best was {best:.4g}"
            self.book.fire("M103", evidence, sure=sureness((now - best) / max(limit, 1e-12)))
        elif now - best < 0.5 * limit:
            self.book.clear("M103")


class Plateau(Detector):
    """M104. Says nothing at the end of a schedule, where a flat loss is what one wants."""

    compares = True

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
        third = [loss for loss in losses[-(len(losses) // 3) :] if math.isfinite(loss)]
        if len(third) < 20:
            return  # most of the curve was cut away by a rollback
        halves = third[: len(third) // 2], third[len(third) // 2 :]
        first, last = median(halves[0]), median(halves[1])
        noise = 2.5 * math.hypot(
            *(spread(half) / math.sqrt(len(half)) for half in halves)
        )  # two errors of medians
        change = 2 * abs(first - last)  # the middles of the halves are half a window apart
        flat = change + 2 * noise < self.settings.plateau_gain * abs(first)
        if flat and not self._late(record):
            evidence = f"loss {last:.4g} since step {steps[-len(third)]:.0f}"
            self.book.fire("M104", evidence, sure=0.7)
        else:
            self.book.clear("M104")

    def _late(self, record: Record) -> bool:
        total = self.facts.total_steps
        over = bool(total and record.step is not None and record.step > 0.8 * total)
        return over or self.lr < self.settings.plateau_lr * self.peak_lr
