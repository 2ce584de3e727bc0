"""Many plain lines at once: columns of numbers, so that a long and healthy log costs little per line.

A block says exactly what its records would say one by one. It only holds lines that are alike and finite and whose
steps do not go back; whatever is different is read as single records.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise

from runwatch.bucket_lists import lists_of
from runwatch.history import Window
from runwatch.records import LARGEST, OF_TRAINING, RATES, Record

FEWEST_LINES = 8
"""Fewer lines are not worth the trouble."""
MOST_LINES = 1024
"""Lines of a block, or of a stretch of them, at most."""


@dataclass(slots=True)
class Block:
    """Lines of one file that hold the same values."""

    steps: list[int]
    times: list[float] | None
    values: dict[str, list[float]]
    """Per name one finite number a line."""
    texts: list[str] = field(default_factory=list)
    """The lines themselves, if they hold losses per time bucket."""
    order: list[float] = field(default_factory=list)
    """By what the lines are put in order with those of other files; never goes back."""
    _rates: tuple[str, list[float]] | None = None
    _medians: dict[tuple[str, int], tuple[list[float], list[float]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.steps)

    def record(self, idx: int) -> Record:
        """One line, as it would have been read alone."""
        record = self.bare_record(idx)
        record.lists = lists_of(self.texts[idx]) if self.texts else {}
        return record

    def bare_record(self, idx: int) -> Record:
        """The same without losses per time bucket."""
        time = self.times[idx] if self.times is not None else None
        values = {name: column[idx] for name, column in self.values.items()}
        return Record(self.steps[idx], time, values)

    def part(self, start: int, stop: int) -> Block:
        """Some of the lines."""
        times = self.times[start:stop] if self.times is not None else None
        values = {name: column[start:stop] for name, column in self.values.items()}
        return Block(self.steps[start:stop], times, values, self.texts[start:stop], self.order[start:stop])

    def rates(self) -> tuple[str, list[float]] | None:
        """Throughput of every line, and which kind it is, as `Record.rate` has it."""
        if self._rates is None:
            for name in RATES:
                if name in self.values:
                    self._rates = name, self.values[name]
                    return self._rates
            if "step_seconds" in self.values:
                self._rates = "steps_per_second", [1.0 / seconds for seconds in self.values["step_seconds"]]
        return self._rates

    def medians(self, name: str, window: Window) -> list[float]:
        """The median of a full window before the first line, and after each; two detectors may ask for the same."""
        key, start = (name, window.size), list(window.recent)
        known = self._medians.get(key)
        if known is None or known[0] != start:
            known = self._medians[key] = start, rolling_medians(start, self.values[name])
        return known[1]


class Stretch:
    """Blocks of the same values, each of which goes on where the one before ended, and what stands between them.

    That is lines which tell of something else, such as validations, and checkpoints. What only looks at training may
    take all lines of training at once and not see the rest.
    """

    def __init__(self, first: Block) -> None:
        self.parts: list[Block | Record] = [first]
        self._blocks, self._num_lines = [first], len(first)

    def take(self, item: Block | Record) -> bool:
        """Go on with an item, if it fits."""
        fits = self._continues(item) if isinstance(item, Block) else self._is_aside(item)
        if fits:
            self.parts.append(item)
        if fits and isinstance(item, Block):
            self._blocks.append(item)
            self._num_lines += len(item)
        return fits

    def _continues(self, block: Block) -> bool:
        first, last = self._blocks[0], self._blocks[-1]
        return (
            first.values.keys() == block.values.keys()
            and (first.times is None) == (block.times is None)
            and bool(first.texts) == bool(block.texts)
            and last.steps[-1] <= block.steps[0]
            and self._num_lines + len(block) <= MOST_LINES
        )

    def _is_aside(self, record: Record) -> bool:
        if record.event or record.rank is not None:
            return record.rank is None and record.event in ("saved", "checkpoint")
        names = record.values.keys()
        known = self._blocks[0].values
        return not record.lists and OF_TRAINING.isdisjoint(names) and names.isdisjoint(known)

    @cached_property
    def whole(self) -> Block:
        """All lines of the blocks as one."""
        if len(self._blocks) == 1:
            return self._blocks[0]
        joined, timed = chain.from_iterable, self._blocks[0].times is not None
        values = {
            name: list(joined(block.values[name] for block in self._blocks))
            for name in self._blocks[0].values
        }
        return Block(
            list(joined(block.steps for block in self._blocks)),
            list(joined(block.times or () for block in self._blocks)) if timed else None,
            values,
            list(joined(block.texts for block in self._blocks)),
        )

    def records(self) -> Iterator[Record]:
        """Everything one by one."""
        for part in self.parts:
            if isinstance(part, Block):
                yield from map(part.record, range(len(part)))
            else:
                yield part


def stretches(items: Iterable[Block | Record]) -> Iterator[Stretch | Record]:
    """The same in order, blocks drawn together as far as they go."""
    stretch: Stretch | None = None
    for item in items:
        if stretch is not None and stretch.take(item):
            continue
        if stretch is not None:
            yield stretch
            stretch = None
        if isinstance(item, Block):
            stretch = Stretch(item)
        else:
            yield item
    if stretch is not None:
        yield stretch


def rolling_medians(start: list[float], values: list[float]) -> list[float]:
    """Medians of a window of `len(start)` values that moves over more of them, the first one of `start` itself."""
    ordered, size = sorted(start), len(start)
    half, other = size // 2, (size - 1) // 2
    found = [0.5 * (ordered[other] + ordered[half]) if half != other else ordered[half]]
    add = found.append
    for leaving, value in zip([*start, *values], values, strict=False):
        del ordered[bisect_left(ordered, leaving)]
        insort(ordered, value)
        add(0.5 * (ordered[other] + ordered[half]) if half != other else ordered[half])
    return found


def block_of(
    steps: list[int],
    times: list[float] | None,
    values: dict[str, list[float]],
    texts: list[str] | None = None,
    *,
    finite: bool = False,
) -> Block | None:
    """A block of these columns, or nothing if they are not as plain as that; `finite` numbers are known to be."""
    if len(steps) < FEWEST_LINES or not values or not _is_rising(steps) or abs(steps[-1]) > 2**53:
        return None
    if 0 in values.get("step_seconds", ()):
        return None
    if not finite and not all(map(_is_finite, (*values.values(), times or ()))):
        return None
    return Block(steps, times, values, texts or [])


def _is_rising(steps: list[int]) -> bool:
    return all(first <= second for first, second in pairwise(steps))


def _is_finite(column: Iterable[float]) -> bool:
    """Whether all numbers are finite, and of a size that numbers of logs have."""
    return sum(map(abs, column)) < LARGEST
