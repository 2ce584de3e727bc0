"""Runs that hang, die, or are restarted without progress."""

from __future__ import annotations

from collections import Counter

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import Recent, sureness
from runwatch.records import Record
from runwatch.settings import MonitorSettings
from runwatch.words import duration

_SECONDARY = ("nccl", "rendezvous")
"""What ranks say when another one is gone: never the root cause if there is a better one."""


class Stall(Detector):
    """M501. The usual interval is the 90th percentile of the last ones, so that validation is no stall."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.intervals = Recent(settings.history_lines)
        self.last_at: float | None = None
        self.started_at: float | None = None

    def line(self, record: Record) -> None:
        if record.time is None:
            return
        if self.last_at is not None and record.time >= self.last_at:
            self.intervals.add(record.time - self.last_at)
        self.last_at = record.time
        self.book.clear("M501")

    def event(self, record: Record) -> None:
        if record.event in ("started", "resumed"):
            self.started_at, self.last_at = record.time, None
            self.book.clear("M501")
        elif record.event in ("finished", "stopped"):
            self.book.clear("M501")
        elif record.event == "hung_step":
            self.book.fire("M501", _hung(record), step=record.step)

    def tick(self, now: float, *, live: bool) -> None:
        facts = self.facts
        if facts.ended or facts.alive is False or not (facts.alive or live):
            return
        usual = self.intervals.quantile(0.9) if len(self.intervals) >= 3 else None
        since = self.last_at if self.last_at is not None else self.started_at
        if since is None:
            return
        limit = self.settings.start_seconds
        if usual is not None and self.last_at is not None:
            limit = max(self.settings.stall_factor * usual, self.settings.stall_seconds)
        silent = now - since
        if silent > limit:
            often = f", usually one every {usual:.3g} s" if usual is not None else ""
            where = f"step {self.book.step}" if self.book.step is not None else "the start"
            evidence = f"no line for {duration(silent)} since {where}{often}"
            self.book.fire("M501", evidence, sure=sureness(silent / limit))


def _hung(record: Record) -> str:
    """What the trainer's own watchdog says."""
    seconds, stacks = record.facts.get("seconds"), record.facts.get("stacks")
    lasted = duration(seconds) if isinstance(seconds, int | float) else "too long"
    where = f", where all threads are stands in {stacks}" if stacks else ""
    return f"step {record.step} has taken {lasted}{where}"


class Crash(Detector):
    """M502. With several ranks the first failure that is not a mere echo names the root cause."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.failures: list[Record] = []
        self.ranks: set[int] = set()
        self.named = False

    def rank_line(self, record: Record) -> None:
        if record.rank is not None:
            self.ranks.add(record.rank)

    def event(self, record: Record) -> None:
        if record.facts.get("in_thread"):
            self._failed_in_thread(record)
        elif record.event in ("crash", "killed"):
            self._failed(record)
        elif record.event == "stopped":
            self._stopped(record)
        elif record.event in ("started", "resumed"):
            self._over()
        elif record.event == "interrupted" and record.facts.get("root_cause") and self.failures:
            self._survived()  # the launcher's traceback only repeats it
        elif record.event == "went_on" and self.failures and not self.named:
            self._survived()
        elif record.event == "vanished":
            self.facts.ended = "crashed"
            self._tell(record.text, float(record.facts.get("sure", 0.9)), record.step)
        elif record.event == "hung_step" and record.facts.get("left"):
            self.facts.ended = "crashed"
            self._tell(
                f"{_hung(record)}; the trainer left, as train.step_timeout_action says", 0.99, record.step
            )

    def _failed(self, record: Record) -> None:
        if len(self.failures) < 256:
            self.failures.append(record)
        self.facts.ended = "crashed"
        if record.facts.get("root_cause"):
            self.named = True
            self._tell(self._with_reason(record), 0.99, record.step)
        elif not self.named:
            root = self._root()
            where = f"rank {root.rank}: " if root.rank is not None else ""
            sure = 0.95 if root.facts.get("traceback") else 0.9
            self._tell(f"{where}{root.text}{self._silent_ranks(root)}", sure, root.step)

    def _failed_in_thread(self, record: Record) -> None:
        """Python ends the thread and goes on: a warning that is over, unless the program has crashed already."""
        if not self.failures:
            ended = self.facts.ended
            self._failed(record)
            self._survived()
            self.facts.ended = ended

    def _silent_ranks(self, root: Record) -> str:
        """If all that failed only waited for others, the ones that say nothing are the cause."""
        silent = sorted(self.ranks - {record.rank for record in self.failures if record.rank is not None})
        if root.facts.get("cause") not in _SECONDARY or not silent or len(silent) == len(self.ranks):
            return ""
        return f" (said nothing, look there first: rank {', '.join(map(str, silent[:8]))})"

    def _root(self) -> Record:
        """The earliest failure by its own time where that is known, echoes last."""
        echo = [record.facts.get("cause") in _SECONDARY for record in self.failures]
        stamps = [record.time if record.time is not None else float("inf") for record in self.failures]
        order = sorted(range(len(self.failures)), key=lambda idx: (echo[idx], stamps[idx], idx))
        return self.failures[order[0]]

    def _with_reason(self, record: Record) -> str:
        same = [
            item.text for item in self.failures if item.rank == record.rank and item.facts.get("traceback")
        ]
        return f"{record.text}: {same[0]}" if same else record.text

    def _stopped(self, record: Record) -> None:
        asked = record.text.startswith(("Interrupted", "KeyboardInterrupt"))
        self.facts.ended = "stopped" if asked else "crashed"
        if not asked:
            self._tell(record.text or "stopped by an error", 0.99, record.step)

    def _tell(self, evidence: str, sure: float, step: int | None) -> None:
        alert = self.book.fire("M502", evidence, sure=sure, step=step)
        alert.evidence, alert.sure = evidence, sure  # a better root cause replaces the first guess

    def line(self, record: Record) -> None:
        """An error that training survived was no crash."""
        if self.failures and record.step is not None and not self.named:
            died_at = self.book.alerts["M502", ""].last_step
            if died_at is None or record.step > died_at:
                self._survived()

    def _survived(self) -> None:
        """What was taken for a crash was an error that the program handled."""
        self.book.alerts["M502", ""].level = "warn"
        self._over()

    def _over(self) -> None:
        self.failures.clear()
        self.named, self.facts.ended = False, ""
        self.book.clear("M502")


class Restarts(Detector):
    """M503 and M504."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.starts: Counter[int] = Counter()

    def event(self, record: Record) -> None:
        if record.event == "rolled_back":
            reason = f": {record.text}" if record.text else ""
            noticed = record.facts.get("from_step")
            step = noticed if isinstance(noticed, int) else record.step
            self.book.fire("M504", f"from step {step} to step {record.step}{reason}", step=step)
        elif record.event in ("started", "resumed") and record.step is not None:
            self.starts[record.step] += 1
            if self.starts[record.step] >= 3:
                evidence = f"started {self.starts[record.step]} times at step {record.step}"
                self.book.fire(
                    "M503", evidence, sure=sureness(self.starts[record.step] / 2), step=record.step
                )
        elif record.event == "finished":  # started again afterwards, it has nothing left to do
            self.starts.clear()
            self.book.clear("M503")

    def line(self, record: Record) -> None:
        if self.book.is_open("M503") and record.step is not None:
            stuck = self.book.alerts["M503", ""].last_step or 0
            if record.step > stuck + 10 * max(1, self.facts.checkpoint_every or 1):
                self.book.clear("M503")
