"""Bytes of a file and its text, without losing anything: encoding, byte-order mark, line ends, last newline."""

from __future__ import annotations

import codecs
import io
import tokenize
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

from traindoctor.types import Kind, Span

MAX_BYTES = 2_000_000
"""Larger files are data or generated code; they are left alone."""


@dataclass(frozen=True)
class Source:
    """One file's bytes, decoded so that `encode(text)` gives the same bytes back."""

    path: str
    kind: Kind
    data: bytes
    text: str
    encoding: str
    mark: bytes = b""
    """The byte-order mark, kept outside the text."""

    @cached_property
    def starts(self) -> list[int]:
        """Offset of the first character of every line; a line ends with LF, CR LF or CR."""
        starts = [0]
        text = self.text
        position = 0
        while True:
            newline = text.find("\n", position)
            carriage = text.find("\r", position) if "\r" in text else -1
            if newline < 0 and carriage < 0:
                return starts
            if carriage >= 0 and (newline < 0 or carriage < newline):
                position = carriage + (2 if text.startswith("\r\n", carriage) else 1)
            else:
                position = newline + 1
            starts.append(position)

    def line(self, number: int) -> str:
        """The text of a line, without its end."""
        if not 1 <= number <= len(self.starts):
            return ""
        start = self.starts[number - 1]
        end = self.starts[number] if number < len(self.starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n")

    def offset(self, line: int, column: int) -> int:
        """Position in the text of a line and column, both from 1."""
        return self.starts[line - 1] + column - 1

    def place(self, offset: int) -> tuple[int, int]:
        """Line and column of a position."""
        line = bisect_right(self.starts, offset)
        return line, offset - self.starts[line - 1] + 1

    def span(self, start: int, end: int) -> Span:
        """The span between two positions."""
        return Span(*self.place(start), *self.place(end))

    def encode(self, text: str) -> bytes:
        """The bytes of a changed text, in the file's own encoding."""
        return self.mark + text.encode(self.encoding)

    def programs(self, text: str) -> list[str]:
        """The parts of a changed text that must each be valid by themselves."""
        return [text]

    def line_name(self, line: int) -> str:
        """What a line is called in a sentence."""
        return f"line {line}"

    @property
    def newline(self) -> str:
        """The line end this file uses first."""
        first = self.line(1)
        rest = self.text[len(first) : len(first) + 2]
        return "\r\n" if rest == "\r\n" else "\r" if rest.startswith("\r") else "\n"


class UnreadableError(Exception):
    """The file cannot be decoded without loss; the text says why."""


def read_source(path: str, kind: Kind, data: bytes) -> Source:
    """Decode a file; raises `UnreadableError` where decoding and encoding would not give the same bytes."""
    if b"\0" in data[:8192]:
        raise UnreadableError("it holds NUL bytes")
    mark = codecs.BOM_UTF8 if data.startswith(codecs.BOM_UTF8) else b""
    if kind is Kind.NOTEBOOK:
        from traindoctor.notebook import read_notebook  # it builds upon this module

        return read_notebook(path, data, mark)
    encoding = "utf-8"
    if kind is Kind.PYTHON:
        try:
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise UnreadableError(f"its encoding is not known: {error}") from error
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
    body = data[len(mark) :]
    try:
        text = body.decode(encoding)
    except (UnicodeDecodeError, LookupError) as error:
        if kind is Kind.PYTHON:
            raise UnreadableError(f"it is not {encoding}: {error}") from error
        # Shell, YAML and env files carry no declaration; latin-1 maps every byte to one character and back.
        encoding, text = "latin-1", body.decode("latin-1")
    source = Source(path, kind, data, text, encoding, mark)
    if source.encode(text) != data:
        raise UnreadableError(f"decoding as {encoding} loses information")
    return source
