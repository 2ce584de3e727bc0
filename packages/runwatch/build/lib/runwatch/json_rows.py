"""Lines of JSON by the hundred: decoded in one go into columns, and runs of lines of equal shape become blocks.

Arrow decodes them, because Python takes most of its time for numbers of 17 digits. Two lines have the same shape if
they hold the same numbers, and losses by time or not; what is null is not there. Texts, truth values and other lists
play no part, as in single lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from runwatch.blocks import FEWEST_LINES, MOST_LINES, Block, block_of
from runwatch.bucket_lists import without_lists
from runwatch.follow import Lines
from runwatch.records import BUCKETS, LARGEST, OLDEST_TIME

if TYPE_CHECKING:
    import pyarrow as pa

_ALONE = {"event", "message", "nonfinite", "rank", "_timestamp", "_step"}
"""A line that holds one of these is more than a row of numbers."""
_LONGEST_KEPT = 2**14
"""Lines with losses by time are kept for a while; longer ones are not, so that memory stays bounded."""


def line_blocks(lines: Lines, name_of: Callable[[str], str]) -> Iterator[tuple[int, Block | None]]:
    """Runs of lines `{"..."}`: how many they are, and their block if there is one.

    Lines that cannot be decoded together, be it that one is damaged, are taken in halves.
    """
    table = _decode(lines) if len(lines) >= FEWEST_LINES else None
    if table is not None:
        columns = list(_columns(table, name_of))
        alike = [list(group) for _, group in groupby(sorted(columns, key=_pattern), key=_pattern)]
        for start, stop in _runs([group[0].there for group in alike], len(lines)):
            held = [column for group in alike if group[0].is_there(start) for column in group]
            yield (
                stop - start,
                _block(held, lines[start:stop], start) if stop - start >= FEWEST_LINES else None,
            )
    elif len(lines) < 2 * FEWEST_LINES:
        yield len(lines), None
    else:
        half = len(lines) // 2
        yield from line_blocks(Lines(lines[:half]), name_of)
        yield from line_blocks(Lines(lines[half:]), name_of)


def _decode(lines: Lines) -> pa.RecordBatch | None:
    """One column for each key, or nothing if a line is no JSON or a key has values of two kinds.

    A line that begins within another one would be an object inside an object, so there must be none of these.
    """
    import pyarrow as pa
    from pyarrow import json

    content = without_lists(lines.content or "\n".join(lines).encode("utf-8", "replace"))
    options = json.ReadOptions(use_threads=False, block_size=len(content) + 1)
    try:
        table = json.read_json(pa.BufferReader(content), options)
        parts = table.to_batches()
    except (pa.ArrowException, ValueError):
        return None
    whole = len(parts) == 1 and parts[0].num_rows == len(lines) and "struct<" not in str(table.schema)
    return parts[0] if whole else None


@dataclass
class _Column:
    """What lines say under one key."""

    key: str
    name: str
    there: Any
    """Per line whether it holds the key; None if all do."""
    numbers: list[float] | None = None
    finite: bool = True
    """Whether all its numbers are for certain, and of a size that numbers of logs have."""
    by_time: bool = False
    """Whether they are losses per time bucket, which were cut out."""

    def is_there(self, line: int) -> bool:
        return self.there is None or bool(self.there[line])


def _pattern(column: _Column) -> int:
    """The same for columns that the same lines hold."""
    return id(column.there)


def _columns(table: pa.RecordBatch, name_of: Callable[[str], str]) -> Iterator[_Column]:
    """The columns that matter: numbers, losses by time, and what makes a line special."""
    import numpy as np
    import pyarrow as pa

    known: dict[bytes, Any] = {}
    kinds = {pa.int64(): np.int64, pa.float64(): np.float64}
    for field, column in zip(table.schema, table.columns, strict=True):
        key, kind, count = field.name, kinds.get(field.type), len(column)
        if (num_missing := column.null_count) == count:
            continue
        found = _Column(key, name_of(key), _is_there(column, known) if num_missing else None)
        if kind is not None:  # as they lie in memory; any number where there is none
            raw = np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + count]
            largest = max(abs(float(raw.max())), abs(float(raw.min())))
            found.numbers, found.finite = raw.tolist(), largest * count < LARGEST
            yield found
        elif key in _ALONE or key in BUCKETS:
            found.by_time = key in BUCKETS and pa.types.is_boolean(field.type)
            yield found


def _is_there(column: pa.Array, known: dict[bytes, Any]) -> Any:
    """For each line 1 if it holds a value, 0 where it is null; the same array for columns where that is the same."""
    import numpy as np

    bits = column.buffers()[0].to_pybytes()
    if (found := known.get(bits)) is None:
        every = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        found = known[bits] = every[column.offset : column.offset + len(column)]
    return found


def _runs(patterns: list[Any], count: int) -> Iterator[tuple[int, int]]:
    """Where lines of one shape begin and end, in pieces that are not too long."""
    import numpy as np

    bounds = {0, count}
    for there in patterns:
        if there is not None:
            bounds.update((1 + np.flatnonzero(there[1:] != there[:-1])).tolist())
    for start, stop in pairwise(sorted(bounds)):
        for piece in range(start, stop, MOST_LINES):
            yield piece, min(piece + MOST_LINES, stop)


def _block(columns: list[_Column], lines: list[str], start: int) -> Block | None:
    """Lines of one shape, the first of which has the number `start`, and the columns that they hold."""
    values: dict[str, list[Any]] = {}
    stop, finite, by_time = start + len(lines), True, False
    for column in columns:
        name = column.name
        if column.by_time:
            by_time = True
        elif column.numbers is None or column.key in _ALONE or name in values:
            return None  # something special, or two keys that mean the same
        else:
            values[name], finite = column.numbers[start:stop], finite and column.finite
            if name == "step_seconds" and column.key != "time" and max(values[name]) > OLDEST_TIME:
                return None
    if by_time and max(map(len, lines)) > _LONGEST_KEPT:
        return None
    try:
        steps, times = values.pop("step"), _take_times(values)
        return block_of(list(map(int, steps)), times, values, lines if by_time else None, finite=finite)
    except (LookupError, ValueError, OverflowError):
        return None


def _take_times(values: dict[str, list[Any]]) -> list[float] | None:
    """Out of the values, where they are dates. A ValueError if only some are."""
    stamps = values.get("step_seconds")
    if stamps is None or max(stamps) <= OLDEST_TIME:
        return None
    if min(stamps) <= OLDEST_TIME:
        raise ValueError("dates and durations")
    return list(map(float, values.pop("step_seconds")))
