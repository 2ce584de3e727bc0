"""Ranks that lag behind, and communication that fails."""

from __future__ import annotations

from collections import OrderedDict, deque

from runwatch.alerts import AlertBook
from runwatch.detectors.base import Detector, RunFacts
from runwatch.history import Recent, median
from runwatch.records import Record
from runwatch.settings import MonitorSettings

_STEPS_KEPT = 64
_JUDGED = 20


class Communication(Detector):
    """M602 and M603. Over when steps are logged again."""

    def event(self, record: Record) -> None:
        kind = record.event if record.event in ("nccl", "rendezvous") else record.facts.get("cause")
        code = {"nccl": "M602", "rendezvous": "M603"}.get(str(kind))
        if code:
            where = f"rank {record.rank}: " if record.rank is not None else ""
            self.book.fire(code, where + record.text, sure=0.95)

    def line(self, record: Record) -> None:
        for code in ("M602", "M603"):
            if self.book.is_open(code):
                seen_at = self.book.alerts[code, ""].last_step
                if record.step is not None and (seen_at is None or record.step > seen_at):
                    self.book.clear(code)


class Stragglers(Detector):
    """M601, the subject is the rank. Compares arrival at the same step, own rates, and who fell silent."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        super().__init__(settings, book, facts)
        self.arrivals: OrderedDict[int, dict[int, float]] = OrderedDict()
        self.last_step: dict[int, int] = {}
        self.rates: dict[int, Recent] = {}
        self.late: dict[int, deque[bool]] = {}
        self.judged_step, self.num_judged = -1, 0
        self.before: float | None = None
        self.spacing = Recent(_JUDGED)
        self.reported, self.silent = "", ""

    def line(self, record: Record) -> None:
        if self.silent and record.step is not None:  # a step needs all ranks
            self.book.clear("M601", self.silent)
            self.silent = ""

    def event(self, record: Record) -> None:
        if record.event == "rank_silent":
            self.silent = f"rank {record.facts.get('rank')}"
            name, seconds = record.facts.get("name", self.silent), record.facts.get("seconds", "many")
            evidence = f"{name}: no sign of life for {seconds} s; the others wait for it"
            self.book.fire("M601", evidence, subject=self.silent, sure=0.95)
        if record.event != "straggler":
            return
        if self.reported:
            self.book.clear("M601", self.reported)
        rank, self.reported = record.facts.get("rank"), ""
        if rank is not None:
            self.reported = f"rank {rank}"
            name = record.facts.get("name", self.reported)
            self.book.fire("M601", f"{name}: the others wait for it", subject=self.reported, sure=0.85)

    def rank_line(self, record: Record) -> None:
        rank, step = record.rank, record.step
        if rank is None or step is None:
            return
        if step > self.last_step.get(rank, step):
            self.spacing.add(step - self.last_step[rank])
        self.last_step[rank] = step
        rate = record.rate()
        if rate is not None:
            self.rates.setdefault(rank, Recent(_JUDGED)).add(rate[1])
        if record.time is not None and step > self.judged_step:
            self.arrivals.setdefault(step, {})[rank] = record.time
            if len(self.arrivals) > _STEPS_KEPT:
                self.arrivals.popitem(last=False)
            self._judge_step(step)

    def _judge_step(self, step: int) -> None:
        times = self.arrivals[step]
        if len(self.last_step) < 2 or len(times) < len(self.last_step):
            return
        del self.arrivals[step]
        self.judged_step, self.num_judged = max(self.judged_step, step), self.num_judged + 1
        middle = median(times.values())
        interval, self.before = (middle - self.before if self.before is not None else None), middle
        if interval is None or interval <= 0:
            return
        for rank, arrived in times.items():
            late = (arrived - middle) / interval > self.settings.straggler_lag
            self.late.setdefault(rank, deque(maxlen=_JUDGED)).append(late)
        if self.num_judged % 5 == 0:
            self._tell(list(times))

    def tick(self, now: float, *, live: bool) -> None:
        if len(self.last_step) > 1 and not self.facts.ended:
            self._tell(list(self.last_step))

    def _tell(self, ranks: list[int]) -> None:
        front = max(self.last_step.values())
        usual = median(window.median() for window in self.rates.values())
        for rank in ranks:
            silent = self._silent(rank, self.last_step[rank], front)
            evidence = self._late_arrival(rank) or self._slow(rank, usual) or silent
            if evidence:
                self.book.fire("M601", f"rank {rank} {evidence}", subject=f"rank {rank}", sure=0.85)
            else:
                self.book.clear("M601", f"rank {rank}")

    def _late_arrival(self, rank: int) -> str:
        late = self.late.get(rank, ())
        if len(late) < _JUDGED or sum(late) < self.settings.straggler_share * len(late):
            return ""
        return f"came late to {sum(late)} of the last {len(late)} steps"

    def _slow(self, rank: int, usual: float) -> str:
        window = self.rates.get(rank)
        if window is None or len(window) < _JUDGED or len(self.rates) < 2:
            return ""
        own = window.median()
        return (
            f"runs at {own:.4g}, the median rank at {usual:.4g}"
            if own < (1 - self.settings.straggler_lag) * usual
            else ""
        )

    def _silent(self, rank: int, step: int, front: int) -> str:
        """Behind by many logged steps, whatever number of steps lies between two lines."""
        spacing = self.spacing.median() if len(self.spacing) else 1.0
        behind = front - step
        return f"is {behind} steps behind" if behind > self.settings.rank_silent_steps * spacing else ""
