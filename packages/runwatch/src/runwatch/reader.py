"""One log file as records in order of time: follows it, parses it, leaves out what was read before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from itertools import islice

from runwatch.follow import FileFollower
from runwatch.machine import file_time
from runwatch.parser import LineParser
from runwatch.records import Record
from runwatch.sources import LogFile
from runwatch.tfevents import EventFollower, is_event_file


class LogReader:
    """A log and what is needed to read it."""

    def __init__(
        self, file: LogFile, *, mapped: Mapping[str, str] | None = None, splits: bool = True
    ) -> None:
        self.file, self.newest = file, 0.0
        self.parser = LineParser(file.rank, mapped=mapped, splits=splits)
        self.follower = EventFollower(file.path) if is_event_file(file.path) else FileFollower(file.path)
        self.restarts, self.known_until, self.newest_own = 0, 0.0, 0.0
        self._known_step = -1

    def records(self, *, last: bool, now: float | None) -> Iterator[tuple[float, Record]]:
        """New records with a time to sort them by; lines that are read again after a cut are left out."""
        yield from self._new(self.follower.lines(), now)
        if last and (rest := self.follower.last_words()):
            yield from self._new([rest], now)

    def _new(self, lines: Iterable[str], now: float | None) -> Iterator[tuple[float, Record]]:
        parse = self.parser.records
        for line in lines:
            for record in parse(line):
                if self._is_new(record, now):
                    yield self.newest, record

    def _is_new(self, record: Record, now: float | None) -> bool:
        if self.file.only_messages and not record.event:
            return False
        if record.time is None:
            record.time, record.has_own_time = now if now is not None else self._written(), False
        if self.follower.restarts != self.restarts:
            self.restarts, self.known_until = self.follower.restarts, self.newest_own
        if (
            self.restarts
            and record.has_own_time
            and record.time is not None
            and record.time <= self.known_until
        ):
            return False  # a log that was cut back repeats what is known
        if self.parser.is_document and record.step is not None:
            if self.restarts and record.step <= self._known_step:
                return False
            self._known_step = max(self._known_step, record.step)
        self.newest = max(self.newest, record.time or 0.0)
        if record.has_own_time:
            self.newest_own = max(self.newest_own, record.time or 0.0)
        return True

    def _written(self) -> float | None:
        """Errors carry no time; what stands in a file of errors belongs to the time when it was written."""
        if self.file.path.name not in ("stderr.log", "error.json") and self.file.path.suffix != ".err":
            return None
        return file_time(self.file.path)


def merged(streams: list[Iterator[tuple[float, Record]]]) -> Iterator[Record]:
    """All records in order of time, those of the first file first where times are the same."""
    if len(streams) == 1:
        yield from (record for _, record in streams[0])
        return
    heads: list[tuple[float, int, Record]] = []
    for idx, stream in enumerate(streams):
        heads += [(key, idx, record) for key, record in islice(stream, 1)]
    heapify(heads)
    while heads:
        _, idx, record = heads[0]
        yield record
        if following := next(streams[idx], None):
            heapreplace(heads, (following[0], idx, following[1]))
        else:
            heappop(heads)
