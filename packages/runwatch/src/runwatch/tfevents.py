"""TensorBoard's event files without TensorBoard: scalars as lines of JSON, which the parser reads like any others."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_LONGEST = 2**22


def is_event_file(path: Path) -> bool:
    """Whether a file is one by its name."""
    return "tfevents" in path.name


class EventFollower:
    """Reads what is new in an event file; the same calls as `FileFollower`."""

    def __init__(self, path: Path) -> None:
        self.path, self.position, self.restarts = path, 0, 0
        self.changed_at: float | None = None

    def lines(self) -> Iterator[str]:
        """One line of JSON per step and time, with all scalars that were written together."""
        step: int | None = None
        time = 0.0
        values: dict[str, float] = {}
        for at, when, scalars in self._events():
            if at != step and values:
                yield _line(step, time, values)
                values = {}
            step, time = at, when
            values |= scalars
        if values:
            yield _line(step, time, values)

    def last_words(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing is kept open."""

    def _events(self) -> Iterator[tuple[int, float, dict[str, float]]]:
        try:
            with self.path.open("rb") as file:
                self.changed_at = os.fstat(file.fileno()).st_mtime
                file.seek(self.position)
                while len(head := file.read(12)) == 12:
                    length = struct.unpack("<Q", head[:8])[0]
                    body = file.read(length + 4) if length <= _LONGEST else b""
                    if len(body) < length + 4:
                        return
                    self.position = file.tell()
                    yield _event(body[:length])
        except OSError:
            return


def _line(step: int | None, time: float, values: dict[str, float]) -> str:
    bad = [name for name, value in values.items() if not math.isfinite(value)]
    plain = {name: None if name in bad else value for name, value in values.items()}
    return json.dumps({"step": step, "timestamp": time, **plain, **({"nonfinite": bad} if bad else {})})


def _event(data: bytes) -> tuple[int, float, dict[str, float]]:
    """wall_time is field 1, step field 2, the summary field 5 of an Event."""
    time, step = 0.0, 0
    scalars: dict[str, float] = {}
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes) and len(value) == 8:
            time = struct.unpack("<d", value)[0]
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            scalars |= dict(_scalars(value))
    return step, time, scalars


def _scalars(summary: bytes) -> Iterator[tuple[str, float]]:
    """Values are field 1 of a Summary: tag 1, simple_value 2, tensor 8 (its float_val 5, or 4 raw bytes in 4)."""
    for number, content in _fields(summary):
        if number != 1 or not isinstance(content, bytes):
            continue
        tag, scalar = "", None
        for inner, value in _fields(content):
            if inner == 1 and isinstance(value, bytes):
                tag = value.decode("utf-8", "replace")
            elif inner == 2 and isinstance(value, bytes) and len(value) == 4:
                scalar = struct.unpack("<f", value)[0]
            elif inner == 8 and isinstance(value, bytes):
                scalar = _tensor(value)
        if tag and scalar is not None:
            yield tag, scalar


def _tensor(data: bytes) -> float | None:
    for number, value in _fields(data):
        if number in (4, 5) and isinstance(value, bytes) and len(value) == 4:
            return float(struct.unpack("<f", value)[0])
    return None


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protocol buffer: numbers as they are, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data))
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(data):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at
