"""One log file as records in order of time: follows it, parses it, leaves out what was read before."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, islice
from operator import itemgetter

from runwatch.blocks import Block
from runwatch.detectors.base import RunFacts
from runwatch.follow import FileFollower
from runwatch.formats import LineParser
from runwatch.machine import file_time
from runwatch.records import Record
from runwatch.sources import LogFile


class LogReader:
    """A log and what is needed to read it."""

    def __init__(self, file: LogFile, facts: RunFacts) -> None:
        self.file, self.follower, self.parser = file, FileFollower(file.path), LineParser(file.rank)
        self.facts, self.newest = facts, 0.0
        self.restarts, self.known_until = 0, 0.0

    def records(self, *, last: bool, now: float | None) -> Iterator[tuple[float, Record | Block]]:
        """New records with a time to sort them by; lines that are read again after a cut are left out."""
        for lines in self.follower.batches():
            plain = not self.file.only_messages and not self.follower.restarts
            for item in (
                self.parser.parse_many(lines) if plain else filter(None, map(self.parser.parse, lines))
            ):
                if isinstance(item, Block):
                    yield self._dated(item, now)
                elif self._is_new(item, now):
                    yield self.newest, item
        rest = self.follower.last_words() if last else ""
        if rest and (record := self.parser.parse(rest)) is not None and self._is_new(record, now):
            yield self.newest, record

    def _dated(self, block: Block, now: float | None) -> tuple[float, Block]:
        if block.times is None and (time := now if now is not None else self._written()) is not None:
            block.times = [time] * len(block)
        if block.times is None:
            block.order = [self.newest] * len(block)
        else:
            block.order = list(accumulate(block.times, max, initial=self.newest))[1:]
        self.newest = block.order[-1]
        return block.order[0], block

    def _is_new(self, record: Record, now: float | None) -> bool:
        if self.file.only_messages and not record.event:
            return False
        if record.time is None:
            record.time = now if now is not None else self._written()
        if self.follower.restarts != self.restarts:
            self.restarts, self.known_until = self.follower.restarts, self.newest
        if self.restarts and record.time is not None and record.time <= self.known_until:
            return False
        self.newest = max(self.newest, record.time or 0.0)
        self.facts.total_steps = self.facts.total_steps or self.parser.total
        return True

    def _written(self) -> float | None:
        """Errors carry no time; what stands in a file of errors belongs to the time when it was written."""
        if self.file.path.name not in ("stderr.log", "error.json") and self.file.path.suffix != ".err":
            return None
        return file_time(self.file.path)


def merged(streams: list[Iterator[tuple[float, Record | Block]]]) -> Iterator[Record | Block]:
    """All records in order of time, those of the first file first where times are the same; blocks are cut for that."""
    heads: list[tuple[float, int, Record | Block]] = []
    for idx, stream in enumerate(streams):
        heads += [(key, idx, item) for key, item in islice(stream, 1)]
    heapify(heads)
    while heads:
        _, idx, item = heads[0]
        if isinstance(item, Block) and len(heads) > 1:
            key, other, _ = min(heads[1:3], key=itemgetter(0, 1))
            count = (bisect_right if idx < other else bisect_left)(item.order, key)
            if count < len(item):
                yield item.part(0, count)
                heapreplace(heads, (item.order[count], idx, item.part(count, len(item))))
                continue
        yield item
        if following := next(streams[idx], None):
            heapreplace(heads, (following[0], idx, following[1]))
        else:
            heappop(heads)
