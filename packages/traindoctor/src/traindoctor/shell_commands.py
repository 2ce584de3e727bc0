"""From shell tokens to simple commands, with the tests that guard them and the pipelines they stand in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from traindoctor.shell_words import HereDocument, Operator, Tokens, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?\+?=")
_DECLARE = ("export", "declare", "typeset", "local", "readonly")
_CLOSERS = ("fi", "done", "esac", "}")
_REDIRECT = ("<", ">", ">>", "<<", "<<-", "<<<", "&>", "&>>", ">|", "<&", ">&", "<>")


@dataclass(frozen=True)
class Assignment:
    """`NAME=value`, alone, before a command or behind `export`."""

    name: str
    value: Word
    """The right-hand side; its `raw` may be empty."""
    start: int
    exported: bool
    alone: bool
    """The statement does nothing else."""


@dataclass
class Command:
    """One simple command."""

    words: list[Word] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    redirections: list[tuple[str, Word]] = field(default_factory=list)
    documents: list[HereDocument] = field(default_factory=list)
    start: int = 0
    end: int = 0
    before: str = "\n"
    """The operator in front: `|` makes it the next part of a pipeline."""
    after: str = "\n"
    guards: tuple[str, ...] = ()
    """Text of the tests of the `if`/`while` bodies around it, and `test` inside a test itself."""

    @property
    def name(self) -> str:
        """What is run, without its folder; '' for a bare assignment."""
        return self.words[0].plain.rsplit("/", 1)[-1] if self.words else ""

    @property
    def arguments(self) -> list[str]:
        """The words after the name, quotes removed, expansions as written."""
        return [word.plain for word in self.words[1:]]

    def is_training(self) -> bool:
        """Whether it starts a program that trains: a launcher, or python with a script or module."""
        return _trains(self.name, self.arguments)


_WRAPPERS = frozenset(
    ["env", "nohup", "nice", "ionice", "stdbuf", "timeout", "exec", "command", "time", "numactl", "setsid"]
)
_STARTERS = re.compile(r"(?:.*/)?(python[\d.]*|torchrun|deepspeed|mpirun|srun|accelerate|uv|poetry|pipenv)")


def _trains(name: str, rest: list[str]) -> bool:
    if name in _WRAPPERS:
        for index, word in enumerate(rest):
            if match := _STARTERS.fullmatch(word):
                return _trains(match[1], rest[index + 1 :])
        return False
    if name == "srun" or name in ("torchrun", "deepspeed", "mpirun"):
        return bool(rest)
    if name == "accelerate":
        return rest[:1] == ["launch"]
    if name in ("uv", "poetry", "pipenv"):
        return (
            rest[:1] == ["run"]
            and len(rest) > 1
            and _runs_script(rest[2:] if "python" in rest[1] else rest[1:])
        )
    return bool(re.fullmatch(r"python[\d.]*", name)) and _runs_script(rest)


def _runs_script(rest: list[str]) -> bool:
    """Whether the arguments of python name a script or module that does more than a check."""
    for index, word in enumerate(rest):
        if word == "-m":
            module = rest[index + 1] if index + 1 < len(rest) else ""
            return not module.startswith(("pip", "venv", "json", "http", "pytest", "build", "black", "ruff"))
        if word in ("-c", "-", "--version", "-V"):
            return False
        if not word.startswith("-"):
            return word.endswith(".py") or word.startswith("$")
    return False


def group_commands(tokens: Tokens, text: str) -> list[Command]:
    """The simple commands of a script, in order."""
    grouper = _Grouper(tokens, text)
    return list(grouper.run())


class _Grouper:
    """Walks over the tokens; reserved words open and close guards."""

    def __init__(self, tokens: Tokens, text: str) -> None:
        self.tokens, self.text, self.items = tokens, text, tokens.items
        self.index = 0
        self.guards: list[str] = []
        self.command = Command()
        self.before = "\n"
        self.case_depth, self.in_pattern = 0, False

    def run(self) -> Iterator[Command]:
        """Yield each command when the operator behind it is reached."""
        while self.index < len(self.items):
            item = self.items[self.index]
            self.index += 1
            if isinstance(item, Operator):
                if item.text in _REDIRECT:
                    self._redirect(item)
                    continue
                yield from self._finish(item.text)
                if self.case_depth and item.text in (";;", ";&", ";;&"):
                    self.in_pattern = True
                elif item.text == ")":
                    self.in_pattern = False
            elif self._is_first() and (self._reserved(item) or self._defines_function(item)):
                continue
            elif item.raw == "[[":
                self._test_command(item)
            else:
                _add_word(self.command, item)
        yield from self._finish("\n")

    def _is_first(self) -> bool:
        return not self.command.words and not self.command.assignments

    def _finish(self, after: str) -> Iterator[Command]:
        command = self.command
        if command.words or command.assignments or command.redirections:
            command.after, command.before, command.guards = after, self.before, tuple(self.guards)
            yield command
            self.before = after
        elif after != "\n" or self.before not in ("|", "&&", "||"):
            self.before = after
        self.command = Command()

    def _redirect(self, operator: Operator) -> None:
        target = self.items[self.index] if self.index < len(self.items) else None
        if isinstance(target, Word):
            self.index += 1
            _extend(self.command, operator.start, target.end)
            self.command.redirections.append((operator.text, target))
            self.command.documents += [d for d in self.tokens.documents if d.operator_start == operator.start]

    def _reserved(self, word: Word) -> bool:
        """Whether a word in front of a command is part of the grammar; keeps the guards."""
        raw, guards = word.raw, self.guards
        if self.in_pattern and raw != "esac":
            return True
        if raw in ("if", "while", "until"):
            guards.append("test")
        elif raw == "elif" and guards:
            guards[-1] = "test"
        elif raw in ("then", "do") and guards:
            if guards[-1] == "test":
                guards[-1] = _test_text(self.text, word.start)
        elif raw in ("for", "select"):
            guards.append("for")
            self._skip_to("do")
        elif raw == "case":
            guards.append("case")
            self.case_depth += 1
            self._skip_to("in")
            self.index += 1
            self.in_pattern = True
        elif raw in _CLOSERS:
            if raw == "esac":
                self.case_depth, self.in_pattern = max(self.case_depth - 1, 0), False
            if raw != "}" and guards:
                guards.pop()
        elif raw == "function":
            self.index += 1
        else:
            return raw in ("else", "{", "!", "time")
        return True

    def _skip_to(self, raw: str) -> None:
        while self.index < len(self.items):
            item = self.items[self.index]
            if isinstance(item, Word) and item.raw == raw:
                return
            self.index += 1

    def _defines_function(self, word: Word) -> bool:
        if self.text.startswith("()", word.end):
            self.index += 2
            return True
        return False

    def _test_command(self, word: Word) -> None:
        """`[[ ... ]]` is one command; its operators are not those of the script."""
        start = self.index
        self._skip_to("]]")
        self.index += 1
        inner = [part for part in self.items[start : self.index] if isinstance(part, Word)]
        _extend(self.command, word.start, inner[-1].end if inner else word.end)
        self.command.words += [word, *inner]


def _test_text(text: str, then: int) -> str:
    """The text of the test in front of `then` or `do`."""
    start = max(text.rfind(f"{word} ", 0, then) for word in ("if", "while", "until", "elif"))
    return text[max(start, 0) : then]


def _extend(command: Command, start: int, end: int) -> None:
    if not command.words and not command.assignments and not command.redirections:
        command.start = start
    command.end = max(command.end, end)


def _add_word(command: Command, word: Word) -> None:
    _extend(command, word.start, word.end)
    match = _ASSIGNMENT.match(word.raw)
    declared = bool(command.words) and command.words[0].raw in _DECLARE
    environment = (
        bool(command.words) and command.words[0].raw == "env" and all("=" in w.raw for w in command.words[1:])
    )
    if match and (not command.words or declared or environment):
        value = Word(word.start + match.end(), word.end, word.raw[match.end() :])
        exported = declared and command.words[0].raw == "export"
        command.assignments.append(
            Assignment(match[1], value, word.start, exported, not command.words or declared)
        )
        if environment:
            command.words.append(word)
        return
    command.words.append(word)
