"""Formats with a structure of their own: JSON objects and documents, CSV and tables by their header, boxes."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from runwatch.assembly import Row
from runwatch.names import VALIDATION, Name, Names, words_of
from runwatch.records import BUCKETS, LARGEST, OLDEST_TIME, bucket_losses

_MOST_FIELDS = 400
_SPECIAL = frozenset(
    (
        "step",
        "epoch",
        "total_steps",
        "loss",
        "valid_loss",
        "other_loss",
        "bare_loss",
        "bare_valid",
        "plain_seconds",
    )
)
"""Roles that need a second look; all others are numbers under a name."""
_LONGEST_DOCUMENT = 2**26
_TIMES = frozenset(
    (
        "time",
        "timestamp",
        "_timestamp",
        "ts",
        "wall_time",
        "walltime",
        "created_at",
        "date",
        "asctime",
        "@timestamp",
    )
)
_CELL = re.compile(r"[\w/ .()%@\-#:+'*]{1,60}")
_NUMERIC = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf|infinity)[A-Za-z%]{0,3}", re.I)
_JSONISH = re.compile(r'\s*(?:"|[{}\[\]]|-?\d|true\b|false\b|null\b|NaN\b|-?Infinity\b)')
_LONE_NUMBER = re.compile(r"(?:^|\s|[:=]\s)[-+]?\d(?![\d.]*\s[A-Za-z])")
"""`loss 2.5`; but `max 100 episode reward` is the name of a column."""
_PARTS_OF_DETECTION = ("box", "obj", "cls", "dfl", "theta", "seg", "total")
"""Losses of the YOLO family, whose header leaves the word out."""
HEADER_OF_LOSSES = re.compile(r"(?i)loss|\bbox\b.*\bcls\b|error|entropy|nll|perplexity|\bm[as]p?e\b|rms")
"""A header without such a word names no loss, so it is not taken apart."""
_HEADER_ALIASES = {"e": "epoch", "#": "step", "it": "step", "i": "step"}
_BORDER = re.compile(r"\s*[-=+|─━═┄│┃┌┐└┘├┤┬┴┼╭╮╰╯┏┓┗┛┡┩╇┳┻╋]{6,}\s*")
_BOX = re.compile(r"\s*[|│┃]\s*([^|│┃]+?)\s*[|│┃]\s*([^|│┃]*?)\s*[|│┃]\s*")
_PIPES = re.compile(r"[│┃║]")


def number(value: Any) -> float | None:
    """A number, also one that is written as text; None for anything else."""
    kind = type(value)
    if kind is float:
        return float(value)
    if kind is int:
        return float(value) if abs(value) < LARGEST else None
    if kind is str and value and len(value) < 40:
        try:
            return float(value)
        except ValueError:
            return None
    if kind is list and len(value) == 1:
        return number(value[0])
    return None


class JsonRows:
    """Objects -> rows. Objects with the same keys are alike, and what their keys mean is worked out once."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self._plain: dict[tuple[str, ...], tuple[list[tuple[str, str, float]], list[str]]] = {}

    def row(self, content: dict[str, Any]) -> Row:
        """The numbers of an object; groups such as {"train": {"loss": 1.0}} are taken apart."""
        for name in content.pop("nonfinite", None) or ():
            if isinstance(name, str) and content.get(name) is None:
                content[name] = math.nan
        row, keys = Row(), tuple(content)
        plan = self._plain.get(keys)
        if plan is None:
            plan = self._plain[keys] = self._plan(keys)
            if len(self._plain) > 2000:
                self._plain.clear()
        plain, rest = plan
        values = row.plain
        for key, role, factor in plain:
            value = content[key]
            if type(value) is float:
                values[role] = value * factor
            elif value is not None and (amount := number(value)) is not None and type(value) is not bool:
                values[role] = amount * factor
        for key in rest:
            value = content[key]
            if value is not None and type(value) is not bool:
                _put_other(row, key, value, self.names)
        return row

    def _plan(self, keys: tuple[str, ...]) -> tuple[list[tuple[str, str, float]], list[str]]:
        """Keys whose role no other key of the object has, and all others."""
        names = {key: self.names.of(key) for key in keys if key not in _TIMES}
        roles = Counter(name.role for name in names.values() if name is not None)
        plain: list[tuple[str, str, float]] = []
        rest: list[str] = []
        for key in keys:
            name = names.get(key)
            if (
                name is not None
                and roles[name.role] == 1
                and name.role not in _SPECIAL
                and key not in BUCKETS
            ):
                plain.append((key, name.role, name.factor))
            else:
                rest.append(key)
        return plain, rest


def _put_other(row: Row, key: str, value: Any, names: Names) -> None:
    """What is no plain number: a date, a group of numbers, losses per time bucket, a number as text."""
    if key in _TIMES and _take_time(row, value):
        return
    if type(value) is dict:
        for path, item in _leaves(key, value):
            put(row, _nested_name(path, names), number(item))
    elif key in BUCKETS and type(value) is list:
        row.lists[key] = bucket_losses(value)
    elif key == "rank" and type(value) is int:
        row.rank = value
    else:
        put(row, names.of(key), number(value))


def _leaves(prefix: str, content: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Numbers of objects inside objects, with their paths."""
    for key, value in list(content.items())[:_MOST_FIELDS]:
        if type(value) is dict and depth < 4:
            yield from _leaves(f"{prefix}/{key}", value, depth + 1)
        else:
            yield f"{prefix}/{key}", value


def _nested_name(path: str, names: Names) -> Name | None:
    """By the last word of a path; the rest tells whether it is about validation."""
    prefix, _, last = path.rpartition("/")
    is_validation = bool(VALIDATION & set(words_of(prefix)))
    return names.of(f"val/{last}" if is_validation else last) or names.of(path)


def _take_time(row: Row, value: Any) -> bool:
    """A date, as a number or a text; a duration is none."""
    seconds = number(value)
    if seconds is not None:
        seconds = seconds / 1000 if seconds > 1e11 else seconds
        if seconds > OLDEST_TIME:
            row.time = seconds
        return seconds > OLDEST_TIME
    if isinstance(value, str) and len(value) >= 16:
        try:
            row.time = datetime.datetime.fromisoformat(
                value.replace("Z", "+00:00").replace(",", ".")
            ).timestamp()
        except ValueError:
            return False
        return True
    return False


def put(row: Row, name: Name | None, value: float | None, total: float | None = None) -> None:
    """Keep a number under its name; steps and epochs are marks."""
    if name is None or value is None:
        return
    if name.role == "step":
        is_count = math.isfinite(value) and value == int(value)
        if is_count and (row.marks.step is None or name.rank < row.step_rank):
            row.marks.step, row.marks.step_total, row.step_rank = (
                value,
                total or row.marks.step_total,
                name.rank,
            )
    elif name.role == "epoch":
        if math.isfinite(value):
            row.marks.epoch, row.marks.epoch_total = value, total or row.marks.epoch_total
            row.values.append((name, value))
    elif name.role == "total_steps":
        row.marks.step_total = value
    else:
        row.values.append((name, value * name.factor))


class Document:
    """A file that is one JSON document, such as trainer_state.json; collected until it is whole."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0

    def accepts(self, line: str) -> bool:
        """Whether a line may be a part of a JSON document."""
        return _JSONISH.match(line) is not None

    def lines(self) -> list[str]:
        """What was collected, for a file that is no document after all."""
        return self._lines

    def add(self, line: str) -> list[dict[str, Any]]:
        """The rows of the document once its last line is here."""
        self._lines.append(line)
        self._size += len(line)
        if line.rstrip() not in ("}", "]") and not (
            len(self._lines) == 1 and line.rstrip().endswith(("]", "}"))
        ):
            return []
        if self._size > _LONGEST_DOCUMENT:
            self._lines.clear()
            return []
        try:
            content = json.loads("\n".join(self._lines))
        except ValueError:
            return []
        self._lines.clear()
        return list(rows_of(content))


def rows_of(content: Any, depth: int = 0) -> Iterator[dict[str, Any]]:
    """Lists of objects anywhere in a document; lists of numbers under the names of losses become rows too."""
    if isinstance(content, list):
        for item in content:
            if isinstance(item, dict):
                yield item
    elif isinstance(content, dict) and depth < 3:
        columns = {key: value for key, value in content.items() if _is_column(value)}
        if any("loss" in key.lower() for key in columns):
            for idx in range(max(map(len, columns.values()))):
                row = {key: value[idx] for key, value in columns.items() if idx < len(value)}
                yield row if {"epoch", "step"} & row.keys() else {"epoch": idx + 1, **row}
            return
        for value in content.values():
            if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
                yield from rows_of(value, depth + 1)


def _is_column(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 1
        and all(item is None or number(item) is not None for item in value)
    )


class Table:
    """Rows below a header: CSV, TSV, and columns set apart by spaces or bars."""

    def __init__(self, delimiter: str, columns: list[Name | None], keys: list[str]) -> None:
        self.delimiter, self.columns, self.keys = delimiter, columns, keys
        self._is_counted = delimiter not in ",\t;" and any(
            name and name.role in ("step", "epoch") for name in columns
        )

    def row(self, line: str) -> Row | None:
        """A row of numbers, if the line is one."""
        cells = _cells(line, self.delimiter)
        if len(cells) != len(self.columns):
            return None
        row, filled = Row(), 0
        for name, cell in zip(self.columns, cells, strict=True):
            cell = cell.strip().strip("\"'")
            of = cell.partition("/")
            if name is not None and name.role in ("epoch", "step") and of[2].isdigit():
                put(row, name, number(of[0]), number(of[2]))
                filled += 1
            elif _NUMERIC.fullmatch(cell):
                text = cell.rstrip("%") if self.delimiter in (",", "\t", ";") else cell
                value = number(text.replace(",", "")) if self.delimiter != "," else number(text)
                if value is None and name is not None and name.role.startswith("gpu_memory"):
                    value = number(text[:-1])
                put(row, name, value)
                filled += value is not None
        is_placed = row.marks.any() or not self._is_counted
        return row if filled and is_placed and row.values else None


def _cells(line: str, delimiter: str) -> list[str]:
    if delimiter == "|":
        return list(_PIPES.sub("|", line).strip().strip("|").split("|"))
    return line.rstrip("\r\n").split(delimiter) if delimiter != " " else line.split()


def find_header(line: str, names: Names) -> Table | None:
    """The table that a line is the header of: names only, a loss among them."""
    for delimiter in (",", "\t", ";", "|", " "):
        cells = _header_cells(line, delimiter)
        if len(cells) < 2 or not all(map(_is_name, cells)):
            continue
        parts = _PARTS_OF_DETECTION if {"box", "cls"} <= set(cells) else ()
        aliases = [_HEADER_ALIASES.get(cell.lower(), cell) for cell in cells]
        columns = [names.of(f"{cell} loss" if cell in parts else cell) for cell in aliases]
        roles = [name.role for name in columns if name is not None]
        counted = "step" in roles or "epoch" in roles
        if ("loss" in roles or "valid_loss" in roles) and (
            counted or (delimiter in ",\t;" and (len(cells) > 2 or delimiter == "\t"))
        ):
            return Table(delimiter, columns, cells)
    return None


def _is_name(cell: str) -> bool:
    """Whether a cell may be the name of a column: no number stands in it by itself."""
    return bool(cell) and _CELL.fullmatch(cell) is not None and _LONE_NUMBER.search(cell) is None


def _header_cells(line: str, delimiter: str) -> list[str]:
    if delimiter == " ":
        text = line.strip()
        apart = re.split(r"\s{2,}|\t", text)
        cells = apart if len(apart) > 2 else text.split()
        return cells if len(cells) >= 3 and all(len(cell.split()) <= 3 for cell in cells) else []
    if delimiter == "|" and len(_PIPES.sub("|", line).strip().strip("|").split("|")) < 3:
        return []
    return [cell.strip().strip("\"'") for cell in _cells(line, delimiter)]


class Box:
    """A frame of `| name | value |` lines, as stable-baselines3 and guided-diffusion print; one row for all of it."""

    def __init__(self) -> None:
        self._pairs: list[tuple[str, str]] = []
        self._group = ""

    def add(self, line: str) -> bool:
        """Take a line of a box in; False if it is none."""
        match = _BOX.fullmatch(line)
        if match is None:
            return False
        key, value = match[1], match[2]
        if key.endswith("/") and not value:
            self._group = key if key != "time/" else ""
        elif len(self._pairs) < _MOST_FIELDS:
            self._pairs.append((key if "/" in key else self._group + key, value))
        return True

    def row(self, names: Names) -> Row | None:
        """What the box held; it is empty afterwards."""
        row = Row()
        for key, value in self._pairs:
            put(row, names.of(key), number(value.rstrip("%")))
        self._pairs.clear()
        self._group = ""
        return row if row.values else None

    def is_open(self) -> bool:
        return bool(self._pairs)


def is_border(line: str) -> bool:
    return _BORDER.fullmatch(line) is not None
