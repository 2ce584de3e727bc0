"""One source under watch: follows its files, splits them into runs, looks at the process and the disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping

from runwatch.alerts import Change
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts
from runwatch.follow import FileFollower
from runwatch.goodput import TimeLedger
from runwatch.history import Curve
from runwatch.judged import JudgedRun
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
from runwatch.records import Record
from runwatch.settings import MonitorSettings
from runwatch.sources import LogFile, RunSource, new_files
from runwatch.words import duration

END_SECONDS = 30.0
"""A text log may go on after a handled error; so long it is waited for more."""
FULL_BAR_SECONDS = 600.0
"""A full bar may be that of one epoch, and what follows it may take its time."""
OLD_SECONDS = 6 * 3600.0
"""A log that nobody has written to for so long when it is first looked at has ended."""
RECENT_SECONDS = 600.0
"""Read once: a log that was written to since then may still go on."""
MOST_RUNS = 200


class RunWatch:
    """The runs of one source; the last of them may still go on."""

    def __init__(
        self,
        source: RunSource,
        settings: MonitorSettings,
        *,
        mapped: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.source, self.settings, self.mapped, self.clock = source, settings, mapped or {}, clock
        self.current = JudgedRun(settings, own=source.is_own)
        self.earlier: list[JudgedRun] = []
        self.files = [self._reader(file) for file in source.files]
        self._samples = FileFollower(source.folder.samples) if source.folder else None
        self._config_at = 0.0
        self._polls = 0
        self._was_old = False
        self._is_live = False
        self._seen_at: float | None = None
        """When the newest line of numbers came, by the clock of this machine."""

    # what most readers ask for is that of the last run
    @property
    def panel(self) -> Panel:
        return self.current.panel

    @property
    def facts(self) -> RunFacts:
        return self.current.facts

    @property
    def ledger(self) -> TimeLedger:
        return self.current.ledger

    @property
    def curves(self) -> dict[str, Curve]:
        return self.current.curves

    @property
    def step(self) -> int | None:
        return self.current.step

    @property
    def num_lines(self) -> int:
        return self.current.num_lines

    @property
    def line_time(self) -> float | None:
        return self.current.line_time

    def runs(self) -> list[JudgedRun]:
        """All runs of the source, the last one last."""
        return [*self.earlier, self.current]

    def _reader(self, file: LogFile) -> LogReader:
        alone = self.source.folder is None and len(self.source.files) == 1
        return LogReader(file, mapped=self.mapped, splits=alone)

    def poll(self, *, live: bool) -> list[Change]:
        """Read what is new, look at the machine, let time pass; returns what is news."""
        self._is_live = live
        self._read_config()
        if self.source.folder is not None:
            self.facts.saved_step = newest_checkpoint(self.source.folder.checkpoints)
        self.files += [self._reader(file) for file in self._appeared()]
        stamp = self.clock() if live and self._polls else None
        num_lines = self.current.num_lines
        for record in merged([file.records(last=not live, now=stamp) for file in self.files]):
            if record.new_run:
                self._begin_run()
                num_lines = 0
            self.current.see(record)
        if live and self.current.num_lines > num_lines:  # clocks of other machines and zones do not matter
            self._seen_at = stamp if stamp is not None else self._changed_at()
        if not self._polls:
            self._was_old = self.clock() - self._changed_at() > OLD_SECONDS
        self._polls += 1
        self._read_samples()
        self._after_reading(live)
        return [change for run in self.runs()[-2:] for change in run.take_news()]

    def _begin_run(self) -> None:
        """What follows is another run in the same file; the one before is over."""
        before = self.current
        before.finish()
        self.earlier = [*self.earlier, before][-MOST_RUNS:]
        self.current = JudgedRun(self.settings, own=self.source.is_own)

    def _appeared(self) -> list[LogFile]:
        files = new_files(self.source)
        self.source.files += files
        return files

    def _after_reading(self, live: bool) -> None:
        now, facts, run = self.clock(), self.facts, self.current
        if not self.source.folder:
            self._take_totals()
        if self._was_old and self.files and now - self._changed_at() <= OLD_SECONDS:
            self._was_old = False  # somebody writes again
        self._look_at_process(now)
        if live and not facts.ended:
            self._look_at_disk(now)
        if self._seen_at is not None:
            run.panel.seen(self._seen_at)
        elif run.line_time is None and run.num_lines:
            run.panel.seen(self._changed_at())
        run.panel.tick(now, live=live and not self._was_old)

    def _take_totals(self) -> None:
        """What the counters of the log tell about its end."""
        facts, steppers = self.facts, [file.parser.stepper for file in self.files]
        counter = next((stepper for stepper in steppers if stepper.total), None)
        facts.total_steps = counter.total if counter is not None else None
        facts.total_is_sure = counter is not None and counter.total_is_sure
        if not facts.ended and facts.total_steps and (self.step or 0) >= facts.total_steps:
            facts.ended = "finished"

    def _look_at_process(self, now: float) -> None:
        """The lock file of a run of ours says who holds it; a holder that is gone without a last word was killed."""
        folder = self.source.folder
        if folder is None:
            return
        self.facts.alive = None if self.facts.ended else process_alive(folder.lock_file)
        if self.facts.ended:
            return
        changed, limit = self._changed_at(), self.settings.heartbeat_seconds
        age = heartbeat_age(folder.heartbeat, now) if self.facts.alive is None else None
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
            self.current.note(changed, self.step, text, "error")

    def _look_at_disk(self, now: float) -> None:
        space = disk_space(self.source.path)
        if space is not None:
            self.current.latest["disk_free"] = space[0]
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
                self.current.samples = {"step": content.get("step"), "samples": content["samples"][:8]}

    def state(self, run: JudgedRun | None = None) -> str:
        """waiting, running, stalled, finished, stopped, ended or crashed."""
        run = run or self.current
        if run.facts.ended:
            return run.facts.ended
        if run.panel.book.is_open("M501"):
            return "stalled"
        if not run.num_lines and self._is_live:
            return "waiting"
        limit = OLD_SECONDS if self._is_live else RECENT_SECONDS
        is_quiet = self.clock() - self._changed_at() > limit and not run.facts.alive
        return "ended" if self._was_old or is_quiet else "running"

    def last_line_at(self, run: JudgedRun) -> float | None:
        """When the newest line of a run was written, as far as that is known."""
        return self._seen_at if run is self.current and self._seen_at is not None else run.line_time

    def is_waiting(self) -> bool:
        """Whether the log has not begun yet; one that was read once holds what it holds."""
        return not self.current.num_lines and not self.earlier and self._is_live and not self.has_text()

    def has_text(self) -> bool:
        """Whether anything was written to its files yet."""
        return any(file.follower.position for file in self.files)

    def is_over(self) -> bool:
        """Whether nothing more will come; text logs may go on after a handled error or a full bar, and get grace."""
        facts = self.facts
        if self._was_old and self.source.folder is None:
            return True
        if not facts.ended or self.source.folder is not None:
            return bool(facts.ended)
        is_full_bar = facts.ended == "finished" and bool(facts.total_steps) and not facts.total_is_sure
        grace = FULL_BAR_SECONDS if is_full_bar else END_SECONDS
        return self.clock() - self._changed_at() > grace

    def _changed_at(self) -> float:
        changed = [file.follower.changed_at for file in self.files if file.follower.changed_at is not None]
        return max(changed, default=self.clock())

    def says_something(self) -> bool:
        """Whether a loss was read, or something is wrong."""
        return any(run.num_losses or run.panel.book.worst() for run in self.runs())

    def unread(self) -> tuple[list[str], list[str]]:
        """Names and lines of numbers that were read but not used, for a log that cannot be judged."""
        names: list[str] = []
        lines: list[str] = []
        for file in self.files:
            names += [key for key, _ in file.parser.unread.keys.most_common(12)]
            lines += file.parser.unread.lines
        return names[:12], lines[:5]

    def close(self) -> None:
        for file in self.files:
            file.follower.close()
