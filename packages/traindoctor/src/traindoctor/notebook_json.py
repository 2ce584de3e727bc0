"""The JSON text of a Jupyter notebook: the code of each cell and where it stands.

The text is walked by hand as far as the cells, so that places are known, and given to the JSON decoder below that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")
UNIT = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\.|[^\\]", re.DOTALL
)
"""What stands for one character inside a JSON string."""
_FORMATS = (3, 4)


class NotNotebookError(ValueError):
    """The text is JSON but no notebook that is known; the message says why."""


@dataclass(frozen=True)
class Piece:
    """A stretch of the file that holds code: an element of a list of lines, or a line of one long string."""

    start: int
    end: int
    """Where it begins and ends in the file, without quotes."""
    text: str


@dataclass(frozen=True)
class RawCell:
    """The code of one cell as the file holds it."""

    pieces: tuple[Piece, ...]
    joint: str
    """What the file has between two pieces: quotes, comma and indent of a list; nothing inside one string."""

    @property
    def text(self) -> str:
        """The code."""
        return "".join(piece.text for piece in self.pieces)


@dataclass
class _Cell:
    """What was read of a cell."""

    kind: str = ""
    language: str = ""
    code: RawCell | None = None


@dataclass
class _Notebook:
    """What was read of a notebook."""

    version: Any = None
    language: str = ""
    cells: list[_Cell] = field(default_factory=list)


def read_cells(raw: str) -> list[RawCell]:
    """The code cells that hold something, in order; none where the notebook is written in another language.

    Raises `json.JSONDecodeError` or `NotNotebookError`.
    """
    walk = _Walk(raw)
    notebook = _Notebook()
    if not walk.sees("{"):
        walk.value()
        raise NotNotebookError("its JSON is no object")
    for key in walk.fields():
        if key == "cells" and walk.sees("["):
            notebook.cells += [_read_cell(walk, "source") for _ in walk.elements()]
        elif key == "worksheets" and walk.sees("["):
            _read_worksheets(walk, notebook)
        else:
            _read_value(key, walk.value(), notebook)
    walk.end()
    if notebook.version not in _FORMATS:
        told = "no nbformat" if notebook.version is None else f"nbformat {notebook.version!r}"
        raise NotNotebookError(f"it has {told}; notebooks of nbformat 3 and 4 are read")
    return [
        cell.code
        for cell in notebook.cells
        if cell.kind == "code"
        and cell.code is not None
        and cell.code.text.strip()
        and _is_python(cell.language or notebook.language)
    ]


def _is_python(language: str) -> bool:
    return not language or language.lower().startswith(("python", "ipython"))


def _read_value(key: str, value: Any, notebook: _Notebook) -> None:
    if key == "nbformat":
        notebook.version = value
    if key == "metadata" and isinstance(value, dict):
        for section, name in (("kernelspec", "language"), ("language_info", "name")):
            told = value.get(section)
            if isinstance(told, dict) and isinstance(told.get(name), str):
                notebook.language = told[name]


def _read_worksheets(walk: _Walk, notebook: _Notebook) -> None:
    """nbformat 3: the cells lie in worksheets, their code in `input`."""
    for _ in walk.elements():
        for key in walk.fields():
            if key == "cells" and walk.sees("["):
                notebook.cells += [_read_cell(walk, "input") for _ in walk.elements()]
            else:
                walk.value()


def _read_cell(walk: _Walk, holder: str) -> _Cell:
    cell = _Cell()
    for key in walk.fields():
        if key == holder:
            cell.code = _read_code(walk)
        else:
            value = walk.value()
            if key == "cell_type":
                cell.kind = str(value)
            elif key == "language":
                cell.language = str(value)
    return cell


def _read_code(walk: _Walk) -> RawCell:
    if not walk.sees("["):
        start = walk.at + 1
        text = walk.string()
        return RawCell(tuple(_lines(walk.raw[start : walk.at - 1], start, text)), "")
    opening = walk.at + 1
    pieces = []
    for _ in walk.elements():
        start = walk.at + 1
        text = walk.string()
        pieces.append(Piece(start, walk.at - 1, text))
    if len(pieces) > 1:
        joint = walk.raw[pieces[0].end : pieces[1].start]
    else:
        joint = '",' + walk.raw[opening : pieces[0].start] if pieces else ""
    return RawCell(tuple(pieces), joint)


def _lines(content: str, start: int, text: str) -> Iterator[Piece]:
    """The lines of one string, each with its place in the file."""
    units = UNIT.findall(content)
    at = 0
    for line in split_at_newlines(text):
        length = sum(map(len, units[at : at + len(line)]))
        yield Piece(start, start + length, line)
        start, at = start + length, at + len(line)


def split_at_newlines(text: str) -> list[str]:
    """Lines with their ends, as notebooks cut them."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


class _Walk:
    """A place in a JSON text that moves on; whoever iterates consumes each value before the next."""

    def __init__(self, raw: str) -> None:
        self.raw = raw
        self.at = 0
        self._skip()

    def _skip(self) -> None:
        found = _BLANK.match(self.raw, self.at)
        assert found is not None  # nothing at all is a match too
        self.at = found.end()

    def sees(self, character: str) -> bool:
        """Whether this character comes next."""
        return self.raw.startswith(character, self.at)

    def _take(self, character: str) -> None:
        if not self.sees(character):
            raise json.JSONDecodeError(f"expected {character!r}", self.raw, self.at)
        self.at += 1
        self._skip()

    def value(self) -> Any:
        """The value that begins here."""
        try:
            value, self.at = _DECODER.raw_decode(self.raw, self.at)
        except RecursionError as error:
            raise NotNotebookError("its JSON is nested too deeply") from error
        return value

    def string(self) -> str:
        """The string that begins here."""
        if not self.sees('"'):
            raise NotNotebookError("the source of a cell is neither a string nor a list of strings")
        return str(self.value())

    def fields(self) -> Iterator[str]:
        """The keys of the object that begins here, each with the place moved to its value."""
        for _ in self._members("{", "}"):
            key = self.value() if self.sees('"') else None
            self._skip()
            self._take(":")
            yield str(key)

    def elements(self) -> Iterator[None]:
        """Stops at each item of the array that begins here."""
        yield from self._members("[", "]")

    def _members(self, opening: str, closing: str) -> Iterator[None]:
        self._take(opening)
        more = not self.sees(closing)
        while more:
            yield None
            self._skip()
            more = self.sees(",")
            if more:
                self._take(",")
        self._skip()
        if not self.sees(closing):
            raise json.JSONDecodeError(f"expected ',' or {closing!r}", self.raw, self.at)
        self.at += 1

    def end(self) -> None:
        """Nothing but blanks may follow."""
        self._skip()
        if self.at < len(self.raw):
            raise json.JSONDecodeError("extra data", self.raw, self.at)
