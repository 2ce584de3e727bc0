"""Parts of files: the documents of a text file, and spans that can be read one without the other.

Several processes can read the spans of one large file. A span is a range of bytes, and holds the lines that begin
there, or a range of the row groups of a Parquet file.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

SMALLEST_PART, LARGEST_PART = 256, 8192
"""Characters of a part: a hundredth of all files, within these limits."""
LOOKED_AT_CHARACTERS, FEWEST_LINES = 2**16, 20
"""How much of a text file decides whether it holds one text per line."""
SMALLEST_MARGIN = 50
"""Characters of a line below which nobody wraps prose."""


def spans(path: Path, size: int) -> list[tuple[int, int] | None]:
    """Parts of about `size` bytes; [None]: the file can only be read as a whole."""
    count = -(-path.stat().st_size // size)
    total = {".parquet": _num_groups, ".jsonl": _num_bytes, ".txt": _num_bytes}.get(path.suffix.lower())
    if count < 2 or total is None:
        return [None]
    edges = sorted({total(path) * idx // count for idx in range(count + 1)})
    return list(pairwise(edges)) or [None]


def _num_bytes(path: Path) -> int:
    return int(path.stat().st_size)


def _num_groups(path: Path) -> int:
    """Row groups of a Parquet file; 0 for a damaged one, which is reported when it is read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with suppress(pa.ArrowException, OSError), path.open("rb") as raw:
        return int(pq.read_metadata(raw).num_row_groups)
    return 0


class LinesFrom:
    """Those lines of a file that begin at one of the bytes from `start` to `end`, without `end`."""

    def __init__(self, raw: BinaryIO, start: int, end: int) -> None:
        self._raw, self._end, self._inside = raw, end, False
        raw.seek(max(0, start - 1))
        rest = b"" if start else b"\n"
        while not rest.endswith(b"\n") and raw.tell() < end:  # of the line that begins before
            rest = raw.readline(2**20) or b"\n"

    def tell(self) -> int:
        """The position in the file."""
        return self._raw.tell()

    def readline(self, most: int) -> bytes:
        """The next line, or `most` bytes of it; empty at the end."""
        if not self._inside and self._raw.tell() >= self._end:
            return b""
        line = self._raw.readline(most)
        self._inside = bool(line) and not line.endswith(b"\n")
        return line

    read = readline


def part_size(num_bytes: int) -> int:
    """Characters of a part of text files of so many bytes."""
    return min(max(num_bytes // 100, SMALLEST_PART), LARGEST_PART)


def divide(text: str | None, unit: str, part_characters: int) -> list[str | None]:
    """The documents of a text file; None: it has no text."""
    if text is None or unit == "file":
        return [text]
    if unit == "line":
        return [line for line in text.splitlines() if line.strip()] or [None]
    pieces = re.split(r"(?<=\n)(?=[ \t]*\n)", text) if "\n\n" in text else text.splitlines(keepends=True)
    parts: list[str | None] = []
    current: list[str] = []
    size = 0
    for piece in pieces:
        current.append(piece)
        size += len(piece)
        if size >= part_characters:
            parts.append("".join(current))
            current, size = [], 0
    return [*parts, "".join(current)] if current or not parts else parts


def every_line_of(text: str | None) -> list[str | None]:
    """Every line, blank ones too, as a file object counts them: each has its row in an array of latents."""
    lines = re.split(r"\r\n|\r|\n", text or "")
    return list(lines[:-1] if lines[-1] == "" else lines)


def looks_like_lines(text: str) -> bool:
    """Whether each line seems to be a text of its own: no blank lines between, and not prose wrapped at a margin."""
    lines = text.splitlines()
    sizes = np.array([len(line) for line in lines if line.strip()])
    if len(sizes) < FEWEST_LINES or len(sizes) < 0.95 * len(lines):
        return False
    margin = float(np.quantile(sizes, 0.95))
    return margin < SMALLEST_MARGIN or float((sizes >= 0.8 * margin).mean()) < 0.5
