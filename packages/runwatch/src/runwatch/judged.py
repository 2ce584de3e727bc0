"""One run as it is judged: its alerts, its curves, its newest values. A file may hold several, one after the other."""

from __future__ import annotations

from collections import deque
from typing import Any

from runwatch.alerts import Change
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts
from runwatch.goodput import TimeLedger
from runwatch.history import Curve
from runwatch.records import BUCKETS, RATES, SHOWN, Record
from runwatch.settings import MonitorSettings

_KEPT = frozenset(SHOWN)
CURVES = (
    "loss", "text_loss", "latent_loss", "valid_loss", "lr", "grad_norm", "rate", "gpu_memory_allocated", "data_wait",
    "text_accuracy", "mfu", "gpu_busy",
)  # fmt: skip
TIMELINE_EVENTS = (
    "started", "resumed", "finished", "stopped", "rolled_back", "out_of_memory", "grown", "save_failed", "interrupted",
    "modes", "crash", "killed", "hung_step", "loader_failed", "loss_spike", "lr_reduced",
)  # fmt: skip


class JudgedRun:
    """What is known about one run."""

    def __init__(self, settings: MonitorSettings, *, own: bool = False) -> None:
        self.facts = RunFacts()
        self.panel = Panel(settings, self.facts, own=own)
        self.curves = {name: Curve() for name in CURVES}
        self.buckets: dict[str, list[float]] = {}
        self.latest: dict[str, float] = {}
        self.latest_at: dict[str, int] = {}
        """Step at which each newest value stood."""
        self.rate_kind = ""
        self._rate_rank = len(RATES)
        """The best kind of rate that was logged; lines that only have a lesser one tell something else."""
        self.by_epoch = False
        """Steps are epochs."""
        self.step: int | None = None
        self.num_lines = 0
        self.num_losses = 0
        self.ranks: set[int] = set()
        self.line_time: float | None = None
        self.pace: deque[tuple[float, int]] = deque(maxlen=30)
        self.timeline: deque[dict[str, Any]] = deque(maxlen=400)
        self.ledger = TimeLedger()
        self.samples: dict[str, Any] | None = None

    def see(self, record: Record) -> None:
        """Judge and remember one record."""
        if record.total is not None:
            self.facts.total_steps = record.total
        self.panel.observe(record)
        if record.event:
            self._see_event(record)
            return
        if record.rank is not None:
            self.ranks.add(record.rank)
            if record.rank != min(self.ranks):
                return
        self.num_lines += 1
        self._see_line(record)

    def _see_line(self, record: Record) -> None:
        if record.has_own_time:
            self.ledger.line(record)
        values, step = record.values, record.step
        self.num_losses += "loss" in values or "valid_loss" in values
        if record.time is not None:
            self.line_time = record.time
        if step is None:
            return
        if record.time is not None and record.has_own_time:
            if self.pace and step < self.pace[-1][1]:
                self.pace.clear()
            self.pace.append((record.time, step))
        if (record.by_epoch or record.by_lines) and step < (self.step or 0):
            self._forget_rate()  # it was that of a bar before the training
        if (rate := record.rate()) is not None and self._is_best_rate(rate[0], values):
            self.rate_kind, self.latest["rate"] = rate
            self.latest_at["rate"] = step
            self.curves["rate"].add(step, rate[1])
        curves = self.curves
        for name, value in values.items():
            if (curve := curves.get(name)) is not None:
                curve.add(step, value)
        self.step, self.by_epoch = step, record.by_epoch
        self._remember_values(record, step)

    def _forget_rate(self) -> None:
        self.rate_kind, self._rate_rank = "", len(RATES)
        for name in ("rate", *RATES):
            self.latest.pop(name, None)

    def _is_best_rate(self, kind: str, values: dict[str, float]) -> bool:
        rank = RATES.index(kind) if kind in values else len(RATES)
        is_best = rank <= self._rate_rank
        self._rate_rank = rank if is_best else self._rate_rank
        return is_best

    def _remember_values(self, record: Record, step: int) -> None:
        values, latest, at = record.values, self.latest, self.latest_at
        if "loss" in values and self.facts.ended == "finished":
            self.facts.ended = ""
        for name, value in values.items():
            if name in _KEPT:
                latest[name], at[name] = value, step
        if record.lists:
            self.buckets |= {name: record.lists[name] for name in BUCKETS if name in record.lists}

    def _see_event(self, record: Record) -> None:
        if record.has_own_time:
            self.ledger.event(record)
        if record.event == "finished":
            self.facts.ended = "finished"
        elif record.event == "interrupted":
            self.facts.ended = "stopped"
        elif record.event in ("started", "resumed"):
            self.facts.ended = ""
        if record.event in TIMELINE_EVENTS:
            what = record.event.replace("_", " ")
            at = record.time if record.time is not None else self.line_time
            step = record.step if record.step is not None else self.step
            self.note(at, step, f"{what}: {record.text}" if record.text else what)

    def finish(self) -> None:
        """The run is over and only its results are needed."""
        self.facts.ended = self.facts.ended or "ended"
        self.take_news()
        self.panel.release()

    def note(self, at: float | None, step: int | None, what: str, level: str = "") -> None:
        """An entry of the timeline."""
        self.timeline.append({"time": at, "step": step, "what": what, "level": level})

    def take_news(self) -> list[Change]:
        """What is new since the last call; it goes into the timeline."""
        news = self.panel.book.take_news()
        for change in news:
            if change.what != "still":
                alert = change.alert
                what = f"{alert.code} {alert.name} {change.what}"
                what += "" if change.what == "resolved" else f": {change.evidence}"
                self.note(change.time, change.step, what, alert.level)
        return news

    def steps_per_second(self) -> float | None:
        """From the last lines' own times, else as logged."""
        if len(self.pace) >= 2 and self.pace[-1][0] > self.pace[0][0]:
            return (self.pace[-1][1] - self.pace[0][1]) / (self.pace[-1][0] - self.pace[0][0])
        return self.latest.get("steps_per_second") or None
