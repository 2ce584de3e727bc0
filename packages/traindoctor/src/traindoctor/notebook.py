"""A Jupyter notebook as one Python module: its code cells in their order, each behind a line that names it.

The text that rules see has a marker line before each cell and stand-ins for lines that only IPython understands. Both
carry a tag that occurs nowhere in the notebook, so that a changed text is taken apart again without doubt.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from traindoctor.notebook_cells import MaskedCell, mask_cell, split_lines
from traindoctor.notebook_json import NotNotebookError, RawCell, read_cells
from traindoctor.notebook_rewrite import rewrite
from traindoctor.source import MAX_BYTES, Source, UnreadableError
from traindoctor.types import CellPlace, Finding, Fix, Kind, Span

MAX_NOTEBOOK_BYTES = 100_000_000
"""Notebooks are read whole, with their outputs."""


@dataclass(frozen=True)
class CellLines:
    """The lines of one cell in the module, the cell and the file."""

    number: int
    first: int
    """Line of the module that holds the cell's first line; the marker stands above."""
    file_lines: tuple[int, ...]
    """Line of the file for each line of the cell."""
    shifts: dict[int, int]
    """Index of a line with a stand-in -> how far it moved its text to the right."""

    def index(self, line: int) -> int:
        """Which line of the cell a line of the module is, from 0."""
        return min(max(line - self.first, 0), len(self.file_lines) - 1)

    def column(self, line: int, column: int) -> int:
        """The column in the cell."""
        return max(column - self.shifts.get(self.index(line), 0), 1)


@dataclass(frozen=True)
class NotebookSource(Source):
    """A notebook; `text` is the module, `encode` writes a changed module into the notebook's own JSON."""

    raw: str = ""
    tag: str = ""
    cells: tuple[RawCell, ...] = ()
    masked: tuple[MaskedCell, ...] = ()
    lines: tuple[CellLines, ...] = ()

    def programs(self, text: str) -> list[str]:
        """The cells of a changed module, which must each compile alone, as IPython does it."""
        parts = re.split(rf"^# {self.tag} cell \d+\n", text, flags=re.MULTILINE)
        if parts[0] or len(parts) != len(self.cells) + 1:
            raise UnreadableError("the change would reach from one cell into another")
        return parts[1:]

    def encode(self, text: str) -> bytes:
        """The bytes of the notebook with a changed module; everything but the changed lines stays as it is."""
        changes = []
        for raw_cell, masked, part in zip(self.cells, self.masked, self.programs(text), strict=True):
            if part != masked.text:
                changes.append((raw_cell, self._unmasked(raw_cell.text, masked, part)))
        return self.mark + rewrite(self.raw, changes).encode(self.encoding)

    def _unmasked(self, old: str, masked: MaskedCell, part: str) -> str:
        """The code of a cell with its own lines in place of the stand-ins."""
        found: list[int] = []

        def restore(match: re.Match[str]) -> str:
            index = int(match[1])
            if match[0] != masked.lines[index].rstrip("\r\n"):
                raise UnreadableError("the change would touch a line that is not Python")
            found.append(index)
            return masked.hidden[index]

        stand_in = rf"(?:^|(?<=\r))[^\r\n]*# {self.tag} (\d+): [^\r\n]*"
        restored = re.sub(stand_in, restore, part, flags=re.MULTILINE)
        if found != sorted(masked.hidden):
            raise UnreadableError("the change would remove a line that is not Python")
        return restored if old.endswith("\n") else restored.removesuffix("\n")

    @property
    def problems(self) -> list[tuple[int, str]]:
        """Line of the module and reason, for each cell that Python cannot parse."""
        return [
            (lines.first + masked.problem[0] - 1, masked.problem[1])
            for lines, masked in zip(self.lines, self.masked, strict=True)
            if masked.problem is not None
        ]

    def line_name(self, line: int) -> str:
        """What a line of the module is called in a sentence."""
        cell = cell_of(self.lines, line)
        return f"cell {cell.number}, line {cell.index(line) + 1}"

    def allows(self, fix: Fix) -> bool:
        """Whether every edit of a fix stays inside one cell and away from lines that are not Python."""
        spans = [edit.span for edit in fix.node_edits]
        spans += [self.span(edit.start, edit.end) for edit in fix.text_edits]
        for span in spans:
            cell = cell_of(self.lines, span.line)
            touched = range(cell.index(span.line), cell.index(span.end_line) + 1)
            inside = cell is cell_of(self.lines, span.end_line) and span.line >= cell.first
            if not inside or cell.shifts.keys() & set(touched):
                return False
        return True


def cell_of(cells: Sequence[CellLines], line: int) -> CellLines:
    """The cell that a line of the module belongs to; a marker belongs to the cell below it."""
    return cells[max(bisect_right(cells, line, key=lambda cell: cell.first - 1) - 1, 0)]


def placed(finding: Finding, cells: Sequence[CellLines]) -> Finding:
    """A finding that also says its cell."""
    if not cells:
        return finding
    span = finding.span
    start, end = cell_of(cells, span.line), cell_of(cells, span.end_line)
    first, last = start.index(span.line), end.index(span.end_line)
    inside = Span(
        first + 1,
        start.column(span.line, span.column),
        last + 1,
        end.column(span.end_line, span.end_column),
    )
    place = CellPlace(start.number, inside, start.file_lines[first], end.file_lines[last])
    return replace(finding, place=place)


def read_notebook(path: str, data: bytes, mark: bytes) -> NotebookSource:
    """The module of a notebook; raises `UnreadableError` with one line for whatever is not one."""
    if len(data) > MAX_NOTEBOOK_BYTES:
        raise UnreadableError(f"it has more than {MAX_NOTEBOOK_BYTES:,} bytes; clear its outputs")
    try:
        raw = data[len(mark) :].decode("utf-8")
        cells = read_cells(raw)
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not utf-8: {error}") from error
    except json.JSONDecodeError as error:
        told = f"{error.msg}: line {error.lineno}, column {error.colno}"
        raise UnreadableError(f"it is not a whole notebook in JSON: {told}") from error
    except NotNotebookError as error:
        raise UnreadableError(f"it is not a notebook that is known: {error}") from error
    texts = [cell.text for cell in cells]
    if sum(map(len, texts)) > MAX_BYTES:
        raise UnreadableError(f"it holds more than {MAX_BYTES:,} characters of code")
    tag = "%%doctor"
    while any(tag in text for text in texts):
        tag = f"%{tag}"
    masked = tuple(mask_cell(text, tag) for text in texts)
    parts = [f"# {tag} cell {number}\n{cell.text}" for number, cell in enumerate(masked, 1)]
    lines = _number_lines(raw, cells, masked)
    return NotebookSource(
        path, Kind.NOTEBOOK, data, "".join(parts), "utf-8", mark, raw, tag, tuple(cells), masked, lines
    )


def _number_lines(raw: str, cells: Sequence[RawCell], masked: Sequence[MaskedCell]) -> tuple[CellLines, ...]:
    """For each cell, where its lines stand in the module and in the file."""
    found = []
    module_line, file_line, counted = 1, 1, 0
    for number, (cell, shown) in enumerate(zip(cells, masked, strict=True), 1):
        starts, lines_of_pieces = [0, *accumulate(len(piece.text) for piece in cell.pieces)], []
        for piece in cell.pieces:
            file_line, counted = file_line + raw.count("\n", counted, piece.start), piece.start
            lines_of_pieces.append(file_line)
        offsets = accumulate((len(line) for line in split_lines(cell.text)[:-1]), initial=0)
        file_lines = tuple(lines_of_pieces[bisect_right(starts, offset) - 1] for offset in offsets)
        found.append(CellLines(number, module_line + 1, file_lines, shown.shifts))
        module_line += 1 + len(shown.lines)
    return tuple(found)
