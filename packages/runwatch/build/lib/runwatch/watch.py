"""One run under watch: follows its files, feeds the detectors, remembers what screens and reports show."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from runwatch.alerts import Change
from runwatch.blocks import Block, Stretch, stretches
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts
from runwatch.follow import FileFollower
from runwatch.goodput import TimeLedger
from runwatch.history import Curve
from runwatch.machine import (
    disk_space,
    file_time,
    heartbeat_age,
    newest_checkpoint,
    process_alive,
    read_config,
    whole,
)
from runwatch.reader import LogReader, merged
from runwatch.records import BUCKETS, SHOWN, Record
from runwatch.settings import MonitorSettings
from runwatch.sources import LogFile, RunSource, new_files
from runwatch.words import duration

CURVES = (
    "loss", "text_loss", "latent_loss", "valid_loss", "lr", "grad_norm", "rate", "gpu_memory_allocated", "data_wait",
    "text_accuracy", "mfu", "gpu_busy",
)  # fmt: skip
END_SECONDS = 30.0
TIMELINE_EVENTS = (
    "started", "resumed", "finished", "stopped", "rolled_back", "out_of_memory", "grown", "save_failed", "interrupted",
    "modes", "crash", "killed", "hung_step", "loader_failed", "loss_spike", "lr_reduced",
)  # fmt: skip


class RunWatch:
    """A run, its alerts and its curves."""

    def __init__(
        self, source: RunSource, settings: MonitorSettings, *, clock: Callable[[], float] = time.time
    ) -> None:
        self.source, self.settings, self.clock = source, settings, clock
        self.facts = RunFacts()
        self.panel = Panel(settings, self.facts)
        self.files = [LogReader(file, self.facts) for file in source.files]
        self.curves = {name: Curve() for name in CURVES}
        self.buckets: dict[str, list[float]] = {}
        self.latest: dict[str, float] = {}
        self.rate_kind = ""
        self.step: int | None = None
        self.num_lines = 0
        self.ranks: set[int] = set()
        self.line_time: float | None = None
        self.pace: deque[tuple[float, int]] = deque(maxlen=30)
        self.timeline: deque[dict[str, Any]] = deque(maxlen=400)
        self.ledger = TimeLedger()
        self.samples: dict[str, Any] | None = None
        self._samples = FileFollower(source.folder.samples) if source.folder else None
        self._config_at = 0.0
        self._polls = 0

    def poll(self, *, live: bool) -> list[Change]:
        """Read what is new, look at the machine, let time pass; returns what is news."""
        self._read_config()
        if self.source.folder is not None:
            self.facts.saved_step = newest_checkpoint(self.source.folder.checkpoints)
        self.files += [LogReader(file, self.facts) for file in self._appeared()]
        stamp = self.clock() if live and self._polls else None
        streams = [file.records(last=not live, now=stamp) for file in self.files]
        for item in stretches(merged(streams)):
            if isinstance(item, Stretch):
                self._see_stretch(item)
            else:
                self.panel.observe(item)
                self._see(item)
        self._polls += 1
        self._read_samples()
        self._after_reading(live)
        news = self.panel.book.take_news()
        self._remember(news)
        return news

    def _appeared(self) -> list[LogFile]:
        found = new_files(self.source)
        self.source.files += found
        return found

    def _see(self, record: Record) -> None:
        if record.event:
            self._see_event(record)
            return
        if record.rank is not None:
            self.ranks.add(record.rank)
            if record.rank != min(self.ranks):
                return
        self.num_lines += 1
        self._see_line(record)

    def _see_stretch(self, stretch: Stretch) -> None:
        """Many lines at once, to the same effect."""
        self.panel.observe_stretch(stretch)
        whole = stretch.whole
        if (rates := whole.rates()) is not None:
            self.curves["rate"].extend(whole.steps, rates[1])
        for name, curve in self.curves.items():
            if name in whole.values:
                curve.extend(whole.steps, whole.values[name])
        self._remember_values(whole.record(len(whole) - 1))
        for part in stretch.parts:
            if isinstance(part, Block):
                self._see_block(part)
            else:
                self._see(part)

    def _see_block(self, block: Block) -> None:
        """What is not a matter of the numbers alone."""
        self.num_lines += len(block)
        self.ledger.block(block)
        self.step = block.steps[-1]
        if block.times is not None:
            self.line_time = block.times[-1]
            if self.pace and block.steps[0] < self.pace[-1][1]:
                self.pace.clear()
            self.pace.extend(zip(block.times[-30:], block.steps[-30:], strict=True))

    def _see_line(self, record: Record) -> None:
        self.ledger.line(record)
        values, step = record.values, record.step
        if step is None:
            return
        if record.time is not None:
            if self.pace and step < self.pace[-1][1]:
                self.pace.clear()
            self.pace.append((record.time, step))
        if (rate := record.rate()) is not None:
            self.curves["rate"].add(step, rate[1])
        for name, value in values.items():
            if (curve := self.curves.get(name)) is not None:
                curve.add(step, value)
        self._remember_values(record)

    def _remember_values(self, record: Record) -> None:
        """What the newest line says."""
        values, self.step = record.values, record.step
        if "loss" in values and self.facts.ended == "finished":
            self.facts.ended = ""
        if record.time is not None:
            self.line_time = record.time
        self.latest |= {name: values[name] for name in SHOWN if name in values}
        if (rate := record.rate()) is not None:
            self.rate_kind, self.latest["rate"] = rate
        for name in BUCKETS:
            if name in record.lists:
                self.buckets[name] = record.lists[name]

    def _see_event(self, record: Record) -> None:
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
            self._note(at, step, f"{what}: {record.text}" if record.text else what)

    def _note(self, at: float | None, step: int | None, what: str, level: str = "") -> None:
        self.timeline.append({"time": at, "step": step, "what": what, "level": level})

    def _remember(self, news: list[Change]) -> None:
        for change in news:
            if change.what != "still":
                alert = change.alert
                what = f"{alert.code} {alert.name} {change.what}"
                what += "" if change.what == "resolved" else f": {change.evidence}"
                self._note(change.time, change.step, what, alert.level)

    def _after_reading(self, live: bool) -> None:
        now, facts = self.clock(), self.facts
        if (
            not facts.ended
            and facts.total_steps
            and (self.step or 0) >= facts.total_steps
            and not self.source.folder
        ):
            facts.ended = "finished"
        self._look_at_process(now)
        if live and not facts.ended:
            self._look_at_disk(now)
        if self.line_time is None and self.num_lines:
            self.panel.seen(self._changed_at())
        self.panel.tick(now, live=live)

    def _look_at_process(self, now: float) -> None:
        """The lock file of a run of ours says who holds it; a holder that is gone without a last word was killed."""
        if self.source.folder is None:
            return
        self.facts.alive = None if self.facts.ended else process_alive(self.source.folder.lock_file)
        if self.facts.ended:
            return
        changed, limit = self._changed_at(), self.settings.heartbeat_seconds
        age = heartbeat_age(self.source.folder.heartbeat, now) if self.facts.alive is None else None
        text, sure = "", 0.9
        if self.facts.alive is False and now - changed > 5:
            text = f"its process is gone since step {self.step} without a last word: killed, or out of host memory"
        elif age is not None and age > limit and now - changed > limit:
            text, sure = (
                f"its heartbeat is {duration(age)} old, and so is step {self.step}: killed, or cut off",
                0.7,
            )
        if text:
            self.panel.observe(Record(event="vanished", step=self.step, text=text, facts={"sure": sure}))
            self._note(changed, self.step, text, "error")

    def _look_at_disk(self, now: float) -> None:
        space = disk_space(self.source.path)
        if space is not None:
            self.latest["disk_free"] = space[0]
            self.panel.observe(Record(event="disk", time=now, facts={"free": space[0], "total": space[1]}))

    def _read_config(self) -> None:
        if self.source.folder is None or not (changed := file_time(self.source.folder.config)):
            return
        if changed == self._config_at:
            return
        self._config_at, config = changed, read_config(self.source.folder.config)
        train = config.get("train")
        if isinstance(train, dict):
            self.facts.total_steps = whole(train.get("steps"))
            self.facts.checkpoint_every = whole(train.get("checkpoint_every"))
        optim = config.get("optim")
        self.facts.lr_restarts = isinstance(optim, dict) and optim.get("schedule") == "restarts"

    def _read_samples(self) -> None:
        for line in self._samples.lines() if self._samples else ():
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict) and isinstance(content.get("samples"), list):
                self.samples = {"step": content.get("step"), "samples": content["samples"][:8]}

    def steps_per_second(self) -> float | None:
        """From the last lines' own times, else as logged."""
        if len(self.pace) >= 2 and self.pace[-1][0] > self.pace[0][0]:
            return (self.pace[-1][1] - self.pace[0][1]) / (self.pace[-1][0] - self.pace[0][0])
        logged = self.latest.get("steps_per_second")
        return logged or None

    def state(self) -> str:
        """waiting, running, stalled, finished, stopped or crashed."""
        if self.facts.ended:
            return self.facts.ended
        if self.panel.book.is_open("M501"):
            return "stalled"
        return "running" if self.num_lines else "waiting"

    def is_over(self) -> bool:
        """Whether nothing more will come; text logs may go on after a handled error or a full bar, and get grace."""
        if not self.facts.ended or self.source.folder is not None:
            return bool(self.facts.ended)
        return self.clock() - self._changed_at() > END_SECONDS

    def _changed_at(self) -> float:
        changed = [file.follower.changed_at for file in self.files if file.follower.changed_at is not None]
        return max(changed, default=self.clock())

    def close(self) -> None:
        for file in self.files:
            file.follower.close()
