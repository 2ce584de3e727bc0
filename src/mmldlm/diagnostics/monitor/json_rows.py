"""Lines of JSON by the hundred: decoded in one go and turned into columns, where they are alike."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from mmldlm.diagnostics.monitor.blocks import FEWEST_LINES, Block, block_of
from mmldlm.diagnostics.monitor.records import BUCKETS

_ALONE = {"event", "message", "nonfinite", "rank", "_timestamp", "_step"}
"""A line that holds one of these is more than a row of numbers."""
_OLDEST_TIME = 1e8
"""A smaller `time` is no date but a duration."""


def decode_rows(lines: list[str]) -> list[dict[str, Any]] | None:
    """All lines as objects, or nothing if one of them is none.

    A raw line end is allowed between two values and nowhere in a string, and rows with an object inside are never taken
    for a block, so half lines cannot add up to whole ones.
    """
    try:
        rows = json.loads("[" + ",\n".join(lines) + "]")
    except (ValueError, RecursionError):
        return None
    alike = len(rows) == len(lines) and all(type(row) is dict for row in rows)
    return rows if alike else None


def row_blocks(
    rows: list[dict[str, Any]], name_of: Callable[[str], str]
) -> Iterator[tuple[int, Block | None]]:
    """Runs of rows with the same keys in the same order: how many they are, and their block if there is one."""
    for keys, group in groupby(rows, key=tuple):
        alike = list(group)
        yield len(alike), _block(keys, alike, name_of) if len(alike) >= FEWEST_LINES else None


def _block(keys: tuple[str, ...], rows: list[dict[str, Any]], name_of: Callable[[str], str]) -> Block | None:
    if not _ALONE.isdisjoint(keys):
        return None
    columns: dict[str, list[Any]] = {}
    for key in keys:
        name, column = name_of(key), [row[key] for row in rows]
        kinds = set(map(type, column))
        if kinds <= {int, float}:
            if name in columns:
                return None  # two keys that mean the same
            columns[name] = column
        elif dict in kinds or len(kinds) > 1 or (list in kinds and name in BUCKETS):
            return None
    try:
        return _with_times(columns, "time" in keys)
    except (ValueError, OverflowError):
        return None


def _with_times(columns: dict[str, list[Any]], has_time: bool) -> Block | None:
    steps, times = columns.pop("step", None), None
    if has_time and (stamps := columns.pop("step_seconds", None)) is not None:
        if min(stamps) > _OLDEST_TIME:
            times = list(map(float, stamps))
        elif max(stamps) <= _OLDEST_TIME:
            columns["step_seconds"] = stamps
        else:
            return None
    return block_of(list(map(int, steps)), times, columns) if steps else None
