"""Dockerfiles and .env files: instructions and assignments with exact positions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from traindoctor.shell_words import ShellError, Word, tokenize
from traindoctor.source import Source
from traindoctor.types import Span


@dataclass(frozen=True)
class Instruction:
    """One Dockerfile instruction with its continuation lines."""

    name: str
    start: int
    body_start: int
    end: int


class DockerFile:
    """The instructions of a Dockerfile; comments are left out."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path = source.path
        self.instructions = list(self._instructions())

    def _instructions(self) -> Iterator[Instruction]:
        number, total = 1, len(self.source.starts)
        while number <= total:
            line = self.source.line(number)
            match = re.match(r"\s*([A-Za-z]+)\s+", line)
            if not match or line.lstrip().startswith("#"):
                number += 1
                continue
            start = self.source.offset(number, 1) + match.start(1)
            body = self.source.offset(number, 1) + match.end()
            heredoc = (
                re.search(r"<<-?\s*[\"']?(\w+)[\"']?", line) if match[1].upper() in ("RUN", "COPY") else None
            )
            if heredoc:
                while number < total and self.source.line(number).strip() != heredoc[1]:
                    number += 1
            else:
                while number < total and self._continues(number):
                    number += 1
            yield Instruction(
                match[1].upper(), start, body, self.source.offset(number, 1) + len(self.source.line(number))
            )
            number += 1

    def _continues(self, number: int) -> bool:
        line = self.source.line(number)
        return line.rstrip().endswith("\\") or (line.lstrip().startswith("#") and number > 1)

    def body(self, instruction: Instruction) -> str:
        """The text after the instruction's name."""
        return self.source.text[instruction.body_start : instruction.end]

    def span(self, start: int, end: int) -> Span:
        """Where two positions lie."""
        return self.source.span(start, end)

    def environment(self) -> Iterator[tuple[str, Word]]:
        """Variables that ENV sets, both spellings."""
        for instruction in self.instructions:
            if instruction.name != "ENV":
                continue
            try:
                items = tokenize(self.source.text, instruction.body_start, instruction.end).items
            except ShellError:
                continue
            words = [item for item in items if isinstance(item, Word)]
            if words and "=" not in words[0].raw and len(words) > 1:
                last = words[-1]
                yield (
                    words[0].raw,
                    Word(words[1].start, last.end, self.source.text[words[1].start : last.end]),
                )
                continue
            for word in words:
                name, equals, value = word.raw.partition("=")
                if equals:
                    yield name, Word(word.start + len(name) + 1, word.end, value)


class EnvFile:
    """The assignments of a .env file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.path = source.path

    def span(self, start: int, end: int) -> Span:
        """Where two positions lie."""
        return self.source.span(start, end)

    def environment(self) -> Iterator[tuple[str, Word]]:
        """Variables and their values; a comment behind a value is no part of it."""
        for number in range(1, len(self.source.starts) + 1):
            match = re.match(
                r"\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^#\s]*)", self.source.line(number)
            )
            if match:
                base = self.source.offset(number, 1)
                yield match[1], Word(base + match.start(2), base + match.end(2), match[2])
