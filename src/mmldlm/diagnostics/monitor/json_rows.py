"""Lines of JSON by the hundred: decoded in one go into columns, and runs of lines of equal shape become blocks.

Arrow decodes them, because Python takes most of its time for numbers of 17 digits. Two lines have the same shape if
they hold the same numbers, and losses by time or not; what is null is not there. Texts, truth values and other lists
play no part, as in single lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mmldlm.diagnostics.monitor.blocks import FEWEST_LINES, MOST_LINES, Block, block_of
from mmldlm.diagnostics.monitor.bucket_lists import without_lists
from mmldlm.diagnostics.monitor.follow import Lines
from mmldlm.diagnostics.monitor.records import BUCKETS, LARGEST, OLDEST_TIME

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
        for start, stop in _runs(columns, len(lines)):
            yield stop - start, _block(columns, start, lines[start:stop])
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

    content = lines.content if lines.content.isascii() else b""
    content = without_lists(content or "\n".join(lines).encode("utf-8", "replace"))
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

    def is_missing(self, line: int) -> bool:
        return self.there is not None and not self.there[line]


def _columns(table: pa.RecordBatch, name_of: Callable[[str], str]) -> Iterator[_Column]:
    """The columns that matter: numbers, losses by time, and what makes a line special."""
    import numpy as np
    import pyarrow as pa

    known: dict[bytes, Any] = {}
    for key, column in zip(table.schema.names, table.columns, strict=True):
        if column.null_count == len(column):
            continue
        found = _Column(key, name_of(key), _is_there(column, known) if column.null_count else None)
        if _is_number(column.type):
            raw = _raw(column)
            found.numbers, found.finite = raw.tolist(), bool(np.abs(raw.astype(float)).sum() < LARGEST)
            yield found
        elif key in _ALONE or key in BUCKETS:
            found.by_time = key in BUCKETS and pa.types.is_boolean(column.type)
            yield found


def _is_number(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind))


def _raw(column: pa.Array) -> Any:
    """The numbers of a column as they lie in memory; any where there is none."""
    import numpy as np
    import pyarrow as pa

    kind = np.int64 if pa.types.is_integer(column.type) else np.float64
    return np.frombuffer(column.buffers()[1], kind)[column.offset : column.offset + len(column)]


def _is_there(column: pa.Array, known: dict[bytes, Any]) -> Any:
    """For each line 1 if it holds a value, 0 where it is null; the same array for columns where that is the same."""
    import numpy as np

    bits = column.buffers()[0].to_pybytes()
    if (found := known.get(bits)) is None:
        every = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
        found = known[bits] = every[column.offset : column.offset + len(column)]
    return found


def _runs(columns: list[_Column], count: int) -> Iterator[tuple[int, int]]:
    """Where lines of one shape begin and end, in pieces that are not too long."""
    import numpy as np

    bounds = {0, count}
    for there in {id(column.there): column.there for column in columns}.values():
        if there is not None:
            bounds.update((1 + np.flatnonzero(there[1:] != there[:-1])).tolist())
    ordered = sorted(bounds)
    for start, stop in pairwise(ordered):
        for piece in range(start, stop, MOST_LINES):
            yield piece, min(piece + MOST_LINES, stop)


def _block(columns: list[_Column], start: int, lines: list[str]) -> Block | None:
    """The lines that begin with number `start`, all of one shape."""
    values: dict[str, list[Any]] = {}
    finite, by_time = True, False
    for column in columns if len(lines) >= FEWEST_LINES else ():
        if column.is_missing(start):
            continue
        name, by_time = column.name, by_time or column.by_time
        if name in values or column.key in _ALONE or (column.numbers is None and not column.by_time):
            return None  # two keys that mean the same, or something special
        if column.numbers is not None:
            values[name], finite = column.numbers[start : start + len(lines)], finite and column.finite
            if name == "step_seconds" and column.key != "time" and max(values[name]) > OLDEST_TIME:
                return None
    if by_time and max(map(len, lines)) > _LONGEST_KEPT:
        return None
    try:
        steps, times = values.pop("step"), _take_times(values, any(one.key == "time" for one in columns))
        return block_of(list(map(int, steps)), times, values, lines if by_time else None, finite=finite)
    except (LookupError, ValueError, OverflowError):
        return None


def _take_times(values: dict[str, list[Any]], has_time: bool) -> list[float] | None:
    """Out of the values, where they are dates. A ValueError if only some are."""
    if not has_time or (stamps := values.pop("step_seconds", None)) is None:
        return None
    if min(stamps) > OLDEST_TIME:
        return list(map(float, stamps))
    if max(stamps) > OLDEST_TIME:
        raise ValueError("dates and durations")
    values["step_seconds"] = stamps
    return None
