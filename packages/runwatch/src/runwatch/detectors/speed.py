"""Runs that became slow, unsteady, or wait for their data."""

from __future__ import annotations

import math
from collections import deque

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import Window, sureness
from runwatch.records import RATES, Record
from runwatch.settings import MonitorSettings


class Throughput(Detector):
    """M301 and M302. The logged rate, else steps over time; the kind of rate never changes within a baseline."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.kind = self.source = ""
        self.history, self.recent = Window(4 * settings.history_lines), Window(5)
        self.changes = Window(settings.unstable_lines)
        self.before: tuple[int, float] | None = None
        self.last_rate = math.nan
        self.last_place: tuple[int, float | None] | None = None
        self.num_apart = 0
        """Lines that follow a gap of several steps, less those that follow the step before."""
        self.has_loss = False
        """Whether a loss was read: what only counts may be an evaluation or the reading of data."""

    def line(self, record: Record) -> None:
        self.has_loss = self.has_loss or "loss" in record.values or "valid_loss" in record.values
        is_sampled = self._is_sampled(record)
        measured = record.rate() or self._from_time(record)
        if measured is None or not measured[1] > 0:
            return
        kind, rate = measured
        source = kind if kind in record.values else "time"
        if source != self.source:
            if self.source and (kind == "steps_per_second" or source == "time"):
                return  # a line that lacks the better kind
            self.kind, self.source = kind, source
            for window in (self.history, self.recent, self.changes):
                window.clear()
        self._judge(rate, record)
        if not is_sampled:
            self._steadiness(rate, record)

    def _is_sampled(self, record: Record) -> bool:
        """Whether the line has the time of one step of many, which says nothing about how steady the run is.

        If these times add up to what passed since the line before, they are means.
        """
        seconds = record.values.get("step_seconds")
        if seconds is None or record.step is None or any(name in record.values for name in RATES):
            return False
        before, self.last_place = self.last_place, (record.step, record.time)
        if before is None:
            return False
        is_apart = record.step - before[0] > 1
        self.num_apart += 1 if is_apart else -1
        if not is_apart or record.time is None or before[1] is None or not record.has_own_time:
            return (
                self.num_apart > 0
            )  # the last line of an epoch and the first of the next stand close together
        return not 0.8 < (record.step - before[0]) * seconds / max(record.time - before[1], 1e-9) < 1.25

    def _from_time(self, record: Record) -> tuple[str, float] | None:
        if record.step is None or record.time is None or "loss" not in record.values or record.by_lines:
            return None
        before, self.before = self.before, (record.step, record.time)
        if before is None or record.step <= before[0] or record.time <= before[1]:
            return None
        return "steps_per_second", (record.step - before[0]) / (record.time - before[1])

    def _judge(self, rate: float, record: Record) -> None:
        self.recent.add(rate)
        ready = len(self.history) >= self.settings.warmup_lines
        now, usual = self.recent.median(), self.history.median() if ready else math.nan
        low = self.settings.drop_ratio * usual
        dropped = ready and len(self.recent) == 5 and self.recent.quantile(0.7) < low  # four of five
        if not ready and len(self.history) >= 3 and self._is_far_slower(rate):
            dropped, usual = True, self.history.median()
            low = self.settings.drop_ratio * usual
        if dropped and self.has_loss:
            evidence = f"{self.kind} {now:.4g} up to step {record.step}, usual {usual:.4g}"
            self.book.fire("M301", evidence, sure=sureness(low / max(now, 1e-12)))
        elif ready and now > 0.5 * (1 + self.settings.drop_ratio) * usual:
            self.book.clear("M301")
        if not dropped:
            self.history.add(rate)

    def _is_far_slower(self, rate: float) -> bool:
        """Within the first lines only a fall that no warm-up explains counts: to less than a tenth, three times."""
        slow = [value < 0.1 * self.history.median() for value in list(self.recent.recent)[-3:]]
        return len(slow) == 3 and all(slow)

    def _steadiness(self, rate: float, record: Record) -> None:
        if math.isfinite(self.last_rate):
            self.changes.add(abs(rate - self.last_rate) / max(rate, self.last_rate))
        self.last_rate = rate
        if len(self.changes) < self.settings.unstable_lines:
            return
        change, limit = self.changes.median(), self.settings.unstable_change
        if change > limit and self.has_loss:
            evidence = f"{self.kind} changes by {change:.0%} from line to line up to step {record.step}"
            self.book.fire("M302", evidence, sure=sureness(change / limit))
        elif change < 0.8 * limit:
            self.book.clear("M302")


class LoaderFailures(Detector):
    """M304."""

    def event(self, record: Record) -> None:
        if record.event == "loader_failed":
            self.book.fire("M304", record.text or f"at step {record.step}", step=record.step)


class DataWait(Detector):
    """M303."""

    needs = frozenset(("data_wait",))

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.recent: deque[float] = deque(maxlen=10)

    def line(self, record: Record) -> None:
        share = record.values.get("data_wait")
        if share is None or not math.isfinite(share):
            return
        self._judge(share, record)

    def _judge(self, share: float, record: Record) -> None:
        self.recent.append(share)
        limit = self.settings.wait_share
        if share <= 0.8 * limit and not self.book.is_open("M303"):
            return
        middle = sorted(self.recent)[len(self.recent) // 2]
        if len(self.recent) == 10 and middle > limit:
            evidence = f"{middle:.0%} of the time up to step {record.step}"
            self.book.fire("M303", evidence, sure=sureness(middle / limit))
        elif middle < 0.8 * limit:
            self.book.clear("M303")
