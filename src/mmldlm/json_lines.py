"""Strict JSON, which every tool can read: logs of one object per line, and values that come back exactly.

Lines (`training_log.jsonl`, `events.jsonl`): numbers that are not finite are written as null, with their keys in a
list `nonfinite`, because bare NaN is not JSON. The reader takes both styles, and skips torn lines and rubbish with a
bounded amount of memory.

Exact values (`dump_exact`, `load_exact`): non-finite numbers become `{"$float": "nan"}`, arrays become their bytes,
and anything else that JSON cannot hold is rejected with its place.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import threading
import types
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Union, get_args, get_origin, get_type_hints

import numpy as np

from mmldlm import durable

NONFINITE = "nonfinite"
LONGEST_LINE = 2**20
_MOST_PENDING = 10_000
_MARKS = ("$float", "$array")

logger = logging.getLogger(__name__)


def encode(record: dict[str, Any], indent: int | None = None) -> bytes:
    """One line of strict JSON, or with `indent` several, newline included."""
    bad: list[str] = []
    plain = _plain(record, "", bad)
    if bad:
        plain[NONFINITE] = bad
    text = json.dumps(plain, indent=indent, ensure_ascii=False, allow_nan=False, default=str)
    return text.encode("utf-8", "replace") + b"\n"


def _plain(value: Any, place: str, bad: list[str]) -> Any:
    """Tensors of one number become that number; the keys of non-finite numbers are collected in `bad`."""
    if isinstance(value, dict):
        return {str(key): _plain(item, f"{place}.{key}".lstrip("."), bad) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{place}.{idx}", bad) for idx, item in enumerate(value)]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        bad.append(place)
        return None
    return value


def decode(line: bytes) -> dict[str, Any] | None:
    """The object in a line, or None. What was not finite is nan (inf where known) and in `nonfinite`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    named = record.pop(NONFINITE) if isinstance(record.get(NONFINITE), list) else []
    names = [key for key in named if isinstance(key, str)]
    bare: list[str] = []
    with contextlib.suppress(RecursionError):
        _plain(record, "", bare)
    for key in names:
        _put_nan(record, key)
    if listed := list(dict.fromkeys([*names, *bare])):
        record[NONFINITE] = listed
    return record


def _put_nan(record: dict[str, Any], key: str) -> None:
    *path, last = [key] if key in record else key.split(".")
    place: Any = record
    with contextlib.suppress(LookupError, ValueError, TypeError):
        for part in path:
            place = place[int(part)] if isinstance(place, list) else place[part]
        index: Any = int(last) if isinstance(place, list) else last
        if place[index] is None:
            place[index] = math.nan


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, in order; nothing when it does not exist."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in raw_lines(file):
            record = decode(line)
            if record is not None:
                yield record


def read_tail(path: Path, size: int = 2**20) -> list[dict[str, Any]]:
    """The records in the last `size` bytes of a file, in order; a line that begins before them is left out."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - size))
        if end > size:
            file.readline()
        return [record for line in raw_lines(file) if (record := decode(line)) is not None]
    return []


def raw_lines(file: BinaryIO) -> Iterator[bytes]:
    """Lines of at most `LONGEST_LINE` bytes; longer ones are left out."""
    while line := file.readline(LONGEST_LINE):
        whole = line.endswith(b"\n") or len(line) < LONGEST_LINE
        if whole:
            yield line
        while not whole and (rest := file.readline(LONGEST_LINE)):
            whole = rest.endswith(b"\n")


def cut_lines(path: Path, key: str, limit: float) -> None:
    """Leave only whole records whose `key` is at most `limit`; atomic, and nothing is written if all of them stay.

    A record without the key shares the fate of the one before it.
    """
    if not path.exists() or sum(map(len, _kept(path, key, limit))) == path.stat().st_size:
        return
    with durable.staged_file(path) as staged:
        durable.write_file(staged, _kept(path, key, limit))


def _kept(path: Path, key: str, limit: float) -> Iterator[bytes]:
    last: float = -math.inf
    with open(path, "rb") as file:
        for line in raw_lines(file):
            record = decode(line)
            if record is None:
                continue
            value = record.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                last = value
            if last <= limit:
                yield line if line.endswith(b"\n") else line + b"\n"


class LineWriter:
    """Appends lines, each in one system call. With a full disk they wait in memory until there is room."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: deque[bytes] = deque(maxlen=_MOST_PENDING)
        self._lock = threading.RLock()
        self._open()

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._written = durable.Prefix.of(self.path)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":  # after a crash inside a line
            self._pending.append(b"\n")

    def written(self) -> durable.Written:
        """Size and checksum of all that should be in the file now."""
        with self._lock:
            return self._written.so_far()

    def write(self, record: dict[str, Any]) -> None:
        """Append a record; an operating-system error is logged, not raised, because training must go on."""
        line = encode(record)
        with self._lock:
            self._pending.append(line)
            self._flush(quiet=len(self._pending) > 1)

    def _flush(self, *, quiet: bool) -> None:
        try:
            while self._pending:
                self._append(self._pending[0])
                self._pending.popleft()
        except OSError as error:
            if not quiet:
                logger.warning("%s; lines wait in memory until then", durable.explain(error, self.path))

    def _append(self, line: bytes) -> None:
        status = os.fstat(self._fd)
        size = status.st_size
        if status.st_nlink == 0:
            self._begin_again()
            size = 0
        try:
            if os.write(self._fd, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        except OSError:
            os.ftruncate(self._fd, size)
            raise
        self._written.add(line)

    def _begin_again(self) -> None:
        """Somebody deleted the file: what comes goes into a new one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        before = self._fd
        self._open()
        os.close(before)
        logger.error("%s was deleted while it was being written; it begins again with this line", self.path)

    def sync(self) -> None:
        """Make all lines durable (a full disk is logged at the write, a lost line costs no work)."""
        with self._lock, contextlib.suppress(OSError):
            self._flush(quiet=True)
            os.fsync(self._fd)

    def close(self) -> None:
        with self._lock:
            if self._fd < 0:
                return
            self._flush(quiet=True)
            self.sync()
            os.close(self._fd)
            self._fd = -1
        if self._pending:
            logger.warning("%s: %d lines could not be written", self.path, len(self._pending))


def dump_exact(value: Any, *, indent: int | None = None) -> bytes:
    """Value -> UTF-8 JSON. Tuples come back as lists, tensors and arrays as arrays."""
    text = json.dumps(_encode(value, "value"), indent=indent, ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8", "surrogatepass")


def load_exact(content: bytes | str) -> Any:
    """The inverse of `dump_exact`; ValueError when the text is not what `dump_exact` writes."""
    if isinstance(content, bytes):
        content = content.decode("utf-8", "surrogatepass")
    try:
        return _decode(json.loads(content, parse_constant=_reject_constant))
    except (RecursionError, TypeError, KeyError) as error:
        raise ValueError(f"not readable: {error}") from error


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def _encode(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, list | tuple):
        return [_encode(item, f"{place}[{idx}]") for idx, item in enumerate(value)]
    if isinstance(value, dict):
        return {_key(key, place): _encode(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, np.generic):
        return _encode(value.item(), place)
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {"$array": _encode_array(value)}
    raise TypeError(f"{place} is a {type(value).__name__}, which JSON cannot hold")


def _key(key: Any, place: str) -> str:
    if not isinstance(key, str) or key in _MARKS:
        raise TypeError(f"{place} has the key {key!r}; keys must be text other than {', '.join(_MARKS)}")
    return key


def _encode_array(array: np.ndarray) -> dict[str, Any]:
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    data = base64.b64encode(little.tobytes()).decode("ascii")
    return {"dtype": array.dtype.name, "shape": list(array.shape), "base64": data}


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"$float"}:
        return float(value["$float"])
    if set(value) == {"$array"}:
        return _decode_array(value["$array"])
    return {key: _decode(item) for key, item in value.items()}


def _decode_array(coded: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(coded["dtype"])
    if dtype.kind not in "biuf":
        raise ValueError(f"an array of type {dtype} is not allowed")
    data = base64.b64decode(coded["base64"], validate=True)
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(coded["shape"])


def from_plain(kind: Any, value: Any) -> Any:
    """The inverse of `dataclasses.asdict`: plain values, as JSON has them, as an instance of an annotated type."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else from_plain(args[0], value)
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        names = [item.name for item in dataclasses.fields(kind) if item.name in value]
        return kind(**{name: from_plain(hints[name], value[name]) for name in names})  # type: ignore[operator]
    if origin in (list, tuple):
        return origin(from_plain(args[0], item) for item in value)
    if origin is dict:
        return {key: from_plain(args[1], item) for key, item in value.items()}
    if kind is float:
        return math.nan if value is None else float(value)
    return value
