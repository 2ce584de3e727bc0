"""The JSON text of a Jupyter notebook: where the code of each cell stands in it, and how to write other code there.

The text is walked by hand as far as the cells and given to the JSON decoder below that. Outputs, metadata, indentation,
order of keys and escapes are never printed again: a change replaces the characters of the changed lines and no others.
"""

from __future__ import annotations

import difflib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

_DECODER = json.JSONDecoder()
_BLANK = re.compile(r"[ \t\r\n]*")
_UNIT = re.compile(
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
    units = _UNIT.findall(content)
    at = 0
    for line in _split(text):
        length = sum(map(len, units[at : at + len(line)]))
        yield Piece(start, start + length, line)
        start, at = start + length, at + len(line)


def _split(text: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def rewrite(raw: str, changes: list[tuple[RawCell, str]]) -> str:
    """The text of the file with other code in these cells."""
    parts, done = [], 0
    for start, end, new in sorted(edit for cell, text in changes for edit in _edits(raw, cell, text)):
        parts += [raw[done:start], new]
        done = end
    return "".join([*parts, raw[done:]])


def _edits(raw: str, cell: RawCell, text: str) -> Iterator[tuple[int, int, str]]:
    """Replacements in the file that give a cell another text; pieces that stay are not touched."""
    pieces, escape = cell.pieces, raw.isascii()
    old, new = [piece.text for piece in pieces], _pieces_of(cell, text)
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for action, first, last, begin, end in matcher.get_opcodes():
        added = [_escaped(line, escape) for line in new[begin:end]]
        if action == "equal":
            continue
        if last - first == end - begin:
            for piece, line in zip(pieces[first:last], new[begin:end], strict=True):
                yield piece.start, piece.end, _patched(raw[piece.start : piece.end], piece.text, line, escape)
        elif action == "replace":
            yield pieces[first].start, pieces[last - 1].end, cell.joint.join(added)
        elif action == "insert" and first < len(pieces):
            at = pieces[first].start
            yield at, at, "".join(line + cell.joint for line in added)
        elif action == "insert":
            at = pieces[-1].end
            yield at, at, "".join(cell.joint + line for line in added)
        elif last < len(pieces):
            yield pieces[first].start, pieces[last].start, ""
        else:
            yield (pieces[first - 1].end if first else pieces[0].start), pieces[-1].end, ""


def _pieces_of(cell: RawCell, text: str) -> list[str]:
    """A new text in pieces: cut as the old one where nothing changed before or behind, in lines between."""
    head, tail = _common(cell.text, text)
    ends = list(accumulate(len(piece.text) for piece in cell.pieces))
    first = bisect_right(ends, head)
    last = max(bisect_left(ends, ends[-1] - tail) + 1, first)
    kept = [piece.text for piece in cell.pieces]
    begin, end = len("".join(kept[:first])), len(text) - len("".join(kept[last:]))
    return [*kept[:first], *_split(text[begin:end]), *kept[last:]]


def _common(old: str, new: str) -> tuple[int, int]:
    """How many characters at the beginning and, apart from these, at the end are the same."""
    shorter = min(len(old), len(new))
    head = next((i for i in range(shorter) if old[i] != new[i]), shorter)
    tail = next((i for i in range(shorter - head) if old[-1 - i] != new[-1 - i]), shorter - head)
    return head, tail


def _patched(content: str, old: str, new: str, escape: bool) -> str:
    """A piece with the characters that differ written anew, the others as they were escaped before."""
    units = _UNIT.findall(content)
    head, tail = _common(old, new)
    middle = _escaped(new[head : len(new) - tail], escape)
    return "".join([*units[:head], middle, *units[len(old) - tail :]])


def _escaped(text: str, escape: bool) -> str:
    """The inside of a JSON string; a file without characters beyond ASCII gets none."""
    return json.dumps(text, ensure_ascii=escape)[1:-1]


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
