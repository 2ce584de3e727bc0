"""One shell script: its commands, SLURM directives, variables and options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cached_property

from traindoctor.shell_commands import Assignment, Command, group_commands
from traindoctor.shell_words import HereDocument, ShellError, Tokens, Word, tokenize
from traindoctor.source import Source
from traindoctor.types import Span


class ShellFile:
    """Commands of a script, its SLURM directives and its variables."""

    def __init__(self, source: Source, start: int = 0, end: int | None = None) -> None:
        self.source = source
        self.path = source.path
        self.tokens: Tokens = tokenize(source.text, start, end)
        self.commands: list[Command] = group_commands(self.tokens, source.text)

    def span(self, start: int, end: int) -> Span:
        """Where two positions lie."""
        return self.source.span(start, end)

    def word_span(self, word: Word) -> Span:
        """Where a word lies."""
        return self.source.span(word.start, word.end)

    def command_span(self, command: Command) -> Span:
        """Where a command lies."""
        return self.source.span(command.start, command.end)

    @cached_property
    def shebang(self) -> str:
        """The first line, if it names an interpreter."""
        first = self.source.line(1)
        return first if first.startswith("#!") else ""

    @cached_property
    def sbatch(self) -> list[tuple[str, str, int, int]]:
        """SLURM directives that count: option, value, position, position of the end."""
        return [item for item in self._directives if item[2] < self._first_command]

    @cached_property
    def late_sbatch(self) -> list[tuple[str, str, int, int]]:
        """SLURM directives behind the first command, which sbatch ignores."""
        return [item for item in self._directives if item[2] >= self._first_command]

    @cached_property
    def _first_command(self) -> int:
        return self.commands[0].start if self.commands else len(self.source.text)

    @cached_property
    def _directives(self) -> list[tuple[str, str, int, int]]:
        found = []
        for start, text in self.tokens.comments:
            match = re.match(r"#SBATCH\s+(--?[\w-]+)(?:[=\s]\s*(\S+))?", text)
            at_line_start = start == 0 or self.source.text[start - 1] == "\n"
            if match and at_line_start:
                found.append((match[1], match[2] or "", start, start + len(text)))
        return found

    def sbatch_value(self, *options: str) -> str | None:
        """The last value given for a directive."""
        values = [value for option, value, _, _ in self.sbatch if option in options]
        return values[-1] if values else None

    def assignments(self) -> Iterator[tuple[Assignment, Command]]:
        """Every assignment with the command it stands in."""
        for command in self.commands:
            for assignment in command.assignments:
                yield assignment, command

    def constants(self) -> dict[str, str]:
        """Variables that are assigned exactly once, to a value without expansions or to `${NAME:-value}`."""
        values: dict[str, set[str]] = {}
        for assignment, _ in self.assignments():
            match = re.fullmatch(r'"?\$\{' + assignment.name + r':?-([^${}]*)\}"?', assignment.value.raw)
            value = match[1] if match else assignment.value.literal
            values.setdefault(assignment.name, set()).add(value if value is not None else "\0")
        return {
            name: next(iter(found)) for name, found in values.items() if len(found) == 1 and "\0" not in found
        }

    def option_state(self, before: int) -> set[str]:
        """Shell options that are on in front of a position: `e`, `u`, `x`, `pipefail`."""
        state: set[str] = set()
        if re.match(r"#!.*\s-\w*e", self.shebang):
            state.add("e")
        for command in self.commands:
            if command.start >= before or command.name != "set":
                continue
            words = command.arguments
            for index, word in enumerate(words):
                on, letters = word.startswith("-"), word[1:]
                if word[:1] not in "-+" or not letters.isalpha():
                    continue
                change = set(letters) - {"o"}
                if "o" in letters and index + 1 < len(words):
                    change |= {
                        {"errexit": "e", "nounset": "u", "xtrace": "x"}.get(
                            words[index + 1], words[index + 1]
                        )
                    }
                state = state | change if on else state - change
        return state

    def pipelines(self) -> Iterator[list[Command]]:
        """Commands joined by `|`, in order."""
        current: list[Command] = []
        for command in self.commands:
            if command.before in ("|", "|&") and current:
                current.append(command)
                continue
            if current:
                yield current
            current = [command]
        if current:
            yield current


__all__ = ["Assignment", "Command", "HereDocument", "ShellError", "ShellFile", "Word"]
