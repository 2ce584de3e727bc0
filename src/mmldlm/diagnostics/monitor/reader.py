"""One log file as records in order of time: follows it, parses it, leaves out what was read before."""

from __future__ import annotations

from collections.abc import Iterator

from mmldlm.diagnostics.monitor.detectors.base import RunFacts
from mmldlm.diagnostics.monitor.follow import FileFollower
from mmldlm.diagnostics.monitor.formats import LineParser
from mmldlm.diagnostics.monitor.machine import file_time
from mmldlm.diagnostics.monitor.records import Record
from mmldlm.diagnostics.monitor.sources import LogFile


class LogReader:
    """A log and what is needed to read it."""

    def __init__(self, file: LogFile, facts: RunFacts) -> None:
        self.file, self.follower, self.parser = file, FileFollower(file.path), LineParser(file.rank)
        self.facts, self.newest = facts, 0.0
        self.restarts, self.known_until = 0, 0.0

    def records(self, *, last: bool, now: float | None) -> Iterator[tuple[float, Record]]:
        """New records with a time to sort them by; lines that are read again after a cut are left out."""
        for line in self.follower.lines():
            if (record := self._record(line, now)) is not None:
                yield self.newest, record
        rest = self.follower.last_words() if last else ""
        if rest and (record := self._record(rest, now)) is not None:
            yield self.newest, record

    def _record(self, line: str, now: float | None) -> Record | None:
        record = self.parser.parse(line)
        if record is None or (self.file.only_messages and not record.event):
            return None
        if record.time is None:
            record.time = now if now is not None else self._written()
        if self.follower.restarts != self.restarts:
            self.restarts, self.known_until = self.follower.restarts, self.newest
        if self.restarts and record.time is not None and record.time <= self.known_until:
            return None
        self.newest = max(self.newest, record.time or 0.0)
        self.facts.total_steps = self.facts.total_steps or self.parser.total
        return record

    def _written(self) -> float | None:
        """Errors carry no time; what stands in a file of errors belongs to the time when it was written."""
        if self.file.path.name not in ("stderr.log", "error.json") and self.file.path.suffix != ".err":
            return None
        return file_time(self.file.path)
