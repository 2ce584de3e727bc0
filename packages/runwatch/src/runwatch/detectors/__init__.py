"""All detectors, and the panel that feeds them; the trainer may own a panel as well as the monitor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runwatch.alerts import AlertBook, Change
from runwatch.detectors.base import Detector, RunFacts
from runwatch.detectors.gradients import Gradients, SkippedUpdates
from runwatch.detectors.learning_rate import LearningRate
from runwatch.detectors.losses import Divergence, LossMissing, LossSpike, NonfiniteLoss, Plateau
from runwatch.detectors.process import Crash, Restarts, Stall
from runwatch.detectors.quality import LatentCollapse, LatentIgnored, ValidationDrift
from runwatch.detectors.ranks import Communication, Stragglers
from runwatch.detectors.resources import Batch, Checkpoints, DiskSpace, OutOfMemory
from runwatch.detectors.speed import DataWait, LoaderFailures, Throughput
from runwatch.history import RunningMean
from runwatch.records import Record, record_of_fields
from runwatch.settings import MonitorSettings

ALL: tuple[type[Detector], ...] = (
    NonfiniteLoss, LossMissing, LossSpike, Divergence, Plateau, Gradients, SkippedUpdates, LearningRate, Throughput,
    DataWait, LoaderFailures, OutOfMemory, Batch, DiskSpace, Stall, Crash, Restarts, Stragglers, Communication,
    Checkpoints, ValidationDrift, LatentCollapse, LatentIgnored,
)  # fmt: skip


MOST_RANKS = 16_384
"""A rank beyond is a number that means something else."""


def _overriding(detectors: list[Detector], name: str) -> list[Any]:
    """The bound methods of the detectors that have one of this name; the others need not be called."""
    chosen = [item for item in detectors if getattr(type(item), name) is not getattr(Detector, name)]
    return [getattr(item, name) for item in chosen]


class Panel:
    """All detectors of one run behind three calls: a record, a tick, and what is news."""

    def __init__(
        self, settings: MonitorSettings | None = None, facts: RunFacts | None = None, *, own: bool = False
    ) -> None:
        self.settings = settings or MonitorSettings()
        self.facts = facts or RunFacts()
        self.book = AlertBook(self.settings, own=own)
        detectors = [kind(self.settings, self.book, self.facts) for kind in ALL]
        self._line, self._event = _overriding(detectors, "line"), _overriding(detectors, "event")
        self._rank_line, self._tick = _overriding(detectors, "rank_line"), _overriding(detectors, "tick")
        self._stall = next(item for item in detectors if isinstance(item, Stall))
        self._main_rank: int | None = None
        self._comparing = [item for item in detectors if item.compares]
        self._mode_stage: float | None = None
        self._series = ""
        self._mean = RunningMean()
        self._interested: dict[tuple[str, ...], list[Any]] = {}

    def observe(self, record: Record) -> None:
        """Feed one record."""
        if record.event:
            self._observe_event(record)
            return
        if record.rank is not None and 0 <= record.rank < MOST_RANKS:
            self._main_rank = record.rank if self._main_rank is None else min(self._main_rank, record.rank)
            for see in self._rank_line:
                see(record)
            if record.rank != self._main_rank:
                return
        self.book.advance(record.step, record.time, counts="loss" in record.values)
        self._enter_stage(record)
        keys = tuple(record.values)
        interested = self._interested.get(keys)
        if interested is None:
            interested = self._interested[keys] = self._with_needs(keys)
        loss = record.values.get("loss")
        young = loss is not None and self._mean.is_young(loss, begins_epoch=record.begins_epoch)
        for see in interested:
            if not (young and see.__self__.compares):
                see(record)

    def _with_needs(self, keys: tuple[str, ...]) -> list[Any]:
        """The detectors that lines with these values mean something to."""
        if len(self._interested) > 1000:
            self._interested.clear()
        needs = [see.__self__.needs for see in self._line]
        return [see for see, need in zip(self._line, needs, strict=True) if need is None or need & set(keys)]

    def _enter_stage(self, record: Record) -> None:
        """In another stage of the modes, or under another name, the loss is another: comparisons start over."""
        stage = record.values.get("mode_stage", self._mode_stage)
        series = record.series or self._series
        is_other = bool(self._series) and series != self._series
        if is_other or (self._mode_stage is not None and stage != self._mode_stage):
            for detector in self._comparing:
                type(detector).__init__(detector, self.settings, self.book, self.facts)  # type: ignore[misc]
        self._mode_stage, self._series = stage, series

    def _observe_event(self, record: Record) -> None:
        if record.time is not None:
            self.book.time = max(record.time, self.book.time or record.time)
        if record.step is not None and record.event in ("started", "resumed", "rolled_back"):
            self.book.step = record.step
        for see in self._event:
            see(record)

    def observe_fields(
        self, step: int, fields: Mapping[str, Any], *, time: float | None = None
    ) -> list[Change]:
        """For a trainer: feed the line it just logged, get what is news."""
        self.observe(record_of_fields(step, fields, time=time))
        return self.book.take_news()

    def release(self) -> None:
        """Forget the histories of the detectors; the book stays."""
        self._line, self._event, self._rank_line, self._tick, self._comparing = [], [], [], [], []
        self._interested = {}

    def tick(self, now: float, *, live: bool = True) -> None:
        """Let time pass."""
        for see in self._tick:
            see(now, live=live)

    def seen(self, at: float) -> None:
        """For logs whose lines tell no time: when the newest of them was written."""
        self._stall.last_at = at
