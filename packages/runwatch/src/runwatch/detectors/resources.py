"""Memory, batch size, disk and checkpoints."""

from __future__ import annotations

import itertools
import math
from collections import deque

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import Window, median, sureness
from runwatch.records import Record
from runwatch.settings import MonitorSettings


class OutOfMemory(Detector):
    """M401."""

    full_size = 0
    """Tokens of a micro-batch before memory ran out for the first time."""

    def event(self, record: Record) -> None:
        if record.event == "grown":
            self._grown(record.facts.get("micro_tokens_after"))
        elif record.event == "oom" or record.facts.get("cause") == "oom":
            self.book.fire("M401", record.text, step=record.step)
        elif record.event == "out_of_memory":
            facts = record.facts
            before, after = facts.get("before", facts.get("micro_tokens_before")), facts.get("after")
            after = after if after is not None else facts.get("micro_tokens_after", facts.get("micro_tokens"))
            change = f", micro_tokens {before} -> {after}" if after is not None else ""
            self.full_size = max(self.full_size, before) if isinstance(before, int) else self.full_size
            self.book.fire(
                "M401",
                f"handled by the trainer at step {record.step}{change}",
                level="warn",
                step=record.step,
            )

    def _grown(self, size: object) -> None:
        if isinstance(size, int) and 0 < self.full_size <= size:
            self.book.clear("M401")


class Batch(Detector):
    """M402."""

    needs = frozenset(("micro_tokens", "batch_size"))

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.name, self.largest, self.recent = "", 0.0, Window(5)
        self.last, self.streak = math.nan, 0

    def line(self, record: Record) -> None:
        name = "micro_tokens" if "micro_tokens" in record.values else "batch_size"
        size = record.values.get(name)
        if size is None or not math.isfinite(size):
            return
        if name != self.name:
            self.name, self.largest = name, 0.0
            self.recent.clear()
        self.streak = self.streak + 1 if size == self.last else 0
        self.last = size
        if self.streak > 10 and not self.book.is_open("M402"):
            return  # nothing changes, as in most runs
        self._judge(size, record)

    def _judge(self, size: float, record: Record) -> None:
        self.recent.add(size)
        if len(self.recent) < 5:
            return
        now = self.recent.median()
        self.largest = max(self.largest, now)
        if now < self.settings.shrink_ratio * self.largest:
            evidence = f"{self.name} {now:.0f} at step {record.step}, was {self.largest:.0f}"
            self.book.fire(
                "M402", evidence, sure=sureness(self.settings.shrink_ratio * self.largest / max(now, 1e-9))
            )
        else:
            self.book.clear("M402")


class DiskSpace(Detector):
    """M403. Records of the event `disk` carry free and total bytes; the reader of the disk is elsewhere."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.past: deque[tuple[float, float]] = deque(maxlen=120)

    def event(self, record: Record) -> None:
        if record.event == "disk_full" or record.facts.get("cause") == "disk_full":
            self.book.fire("M403", record.text, level="error", subject="full", step=record.step)
        elif record.event == "disk" and record.time is not None:
            self._measure(record.time, float(record.facts["free"]), float(record.facts["total"]))

    def _measure(self, now: float, free: float, total: float) -> None:
        self.past.append((now, free))
        hours = self._hours_left()
        if hours is not None and hours < self.settings.disk_hours:
            evidence = f"{free / 2**30:.1f} GiB free, full in about {_duration(hours)} at the present rate"
            level = "error" if hours < 1 else "warn"
            self.book.fire(
                "M403", evidence, level=level, sure=sureness(self.settings.disk_hours / max(hours, 1e-6))
            )
        elif free < self.settings.disk_free_share * total:
            self.book.fire("M403", f"{free / 2**30:.1f} GiB of {total / 2**30:.0f} GiB free", sure=0.8)
        else:
            self.book.clear("M403")

    def _hours_left(self) -> float | None:
        """From the slope of a straight line through the past, if it falls for certain."""
        if len(self.past) < 5 or self.past[-1][0] - self.past[0][0] < 30:
            return None
        mean_t = sum(t for t, _ in self.past) / len(self.past)
        mean_f = sum(f for _, f in self.past) / len(self.past)
        spread = sum((t - mean_t) ** 2 for t, _ in self.past)
        slope = sum((t - mean_t) * (f - mean_f) for t, f in self.past) / max(spread, 1e-9)
        fell = sum(later[1] < earlier[1] for earlier, later in itertools.pairwise(self.past))
        return self.past[-1][1] / -slope / 3600 if slope < 0 and fell >= 3 else None


class Checkpoints(Detector):
    """M701 and M702."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.saved: deque[int] = deque(maxlen=8)
        self.first_step: int | None = None
        self.best, self.is_better = math.inf, True
        """The best validation, and whether it came after the last checkpoint: some keep the best model only."""

    def line(self, record: Record) -> None:
        if record.values.get("valid_loss", math.inf) < self.best:
            self.best, self.is_better = record.values["valid_loss"], True
        if record.step is None or not (self.is_better or self.facts.checkpoint_every):
            return
        self.first_step = record.step if self.first_step is None else self.first_step
        period = self._period()
        if period is None:
            return
        newest = max(self.saved[-1] if self.saved else self.first_step, self.facts.saved_step or 0)
        since = record.step - newest
        limit = self.settings.checkpoint_factor * period
        if since > limit:
            evidence = (
                f"{since} steps without a checkpoint at step {record.step}, one is due every {period:.0f}"
            )
            self.book.fire("M701", evidence, sure=sureness(since / limit))
        else:
            self.book.clear("M701")

    def _period(self) -> float | None:
        if self.facts.checkpoint_every:
            return self.facts.checkpoint_every
        steps = list(self.saved)
        return median(b - a for a, b in itertools.pairwise(steps)) if len(steps) >= 3 else None

    def event(self, record: Record) -> None:
        step = record.step if record.step is not None else self.book.step
        if record.event in ("checkpoint", "saved") and step is not None:
            self.is_better = math.isinf(self.best)
            if not self.saved or step > self.saved[-1]:
                self.saved.append(step)
            self.book.clear("M702")
            self.book.clear("M701")
        elif record.event in ("rolled_back", "resumed", "started") and step is not None:
            while self.saved and self.saved[-1] > step:
                self.saved.pop()
            self.first_step = None
        elif record.event == "save_failed":
            self.book.fire("M702", record.text or f"at step {step}", step=step)


def _duration(hours: float) -> str:
    return f"{hours * 60:.0f} minutes" if hours < 2 else f"{hours:.0f} hours"
