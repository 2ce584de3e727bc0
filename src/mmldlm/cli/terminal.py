"""What commands show: progress, as a live bar in a terminal and a plain line now and then elsewhere; errors; help.

Errors of the library name its arguments; a command names its options instead. Help stands under headings.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Self

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from typer.core import TyperCommand, TyperGroup

from mmldlm.errors import UserError

LINE_SECONDS = 10.0


class ProgressBar:
    """A progress callback: call it with what is done, the total and, if there is more to say, a status."""

    def __init__(
        self, title: str, *, unit: str | None = None, visible: bool = True, console: Console | None = None
    ) -> None:
        """`unit`: what is counted, such as documents, shown with its rate; None: only the share is shown."""
        self.title, self.unit, self.visible = title, unit, visible
        self.console = console or Console(stderr=True)
        self.live = visible and self.console.is_terminal
        counted: tuple[Any, ...] = (TaskProgressColumn(),)
        if unit is not None:
            counted = (MofNCompleteColumn(), TextColumn("{task.fields[status]}", markup=False))
        columns = (TextColumn(title, markup=False), BarColumn(), *counted, TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.live, transient=unit is None)
        self.task: Any = None
        self.line_at = self.started_at = 0.0
        self.done_at_start = 0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def begin(self, done: int, total: int) -> None:
        """The work begins, some of it perhaps done earlier."""
        self.task = self.bar.add_task(self.title, completed=done, total=total, status="")
        self.started_at, self.done_at_start = time.monotonic(), done
        self.line_at = self.started_at + LINE_SECONDS

    def __call__(self, done: int, total: int, status: str | None = None) -> None:
        """Move the bar, or print a line every few seconds."""
        if self.task is None:
            self.begin(done, total)
        now = time.monotonic()
        rate = (done - self.done_at_start) / max(now - self.started_at, 1e-3)
        shown = f"{rate:.0f}/s" if status is None else status
        self.bar.update(self.task, completed=done, total=total, status=shown)
        if self.visible and not self.live and now >= self.line_at:
            self.line_at = now + LINE_SECONDS
            self.note(self.line(done, total, rate, status))

    def line(self, done: int, total: int, rate: float, status: str | None) -> str:
        """What is printed where there is no terminal."""
        left = f", about {(total - done) / rate:.0f} s left" if rate > 0 else ""  # a second pass begins again
        if self.unit is None:
            return f"{self.title}: {100 * done // max(total, 1)} %{left}"
        if status is not None:
            return f"{self.title}: {done} of {total} {self.unit}, {status}"
        return f"{self.title}: {done} of about {total} {self.unit}, {rate:.0f}/s{left}"


def print_json(values: dict[str, Any]) -> None:
    """One line of strict JSON on stdout."""
    from mmldlm.json_lines import encode

    typer.echo(encode(values), nl=False)


def in_options(text: str, options: Mapping[str, str]) -> str:
    """A message of the library in the words of a command: `max_tokens=4` becomes `--max-tokens 4`.

    `options` maps arguments, or `argument=False`, to options.
    """
    for word, option in options.items():
        if "=" in word:
            text = re.sub(rf"(?<![\w/.-]){word}\b", option, text)
    names = "|".join(options)
    text = re.sub(rf"(?<![\w/.-])({names})=", lambda match: f"{options[match[1]]} ", text)
    text = re.sub(rf"(^|; )({names}):", lambda match: f"{match[1]}{options[match[2]]}:", text)
    long = "|".join(name for name in options if "_" in name) or "$."
    return re.sub(rf"(?<![\w/.-])({long})(?![\w/.-])", lambda match: options[match[1]], text)


_PLAIN = {"int": "N", "float": "X", "path": "FILE", "Path": "FILE", "file": "FILE", "directory": "FOLDER"}
"""Type of a value, as Typer writes it -> what help calls it, where a command does not say."""


class PlainHelp(TyperCommand):
    """Help without types of Python. Lists arguments first, then options under their `rich_help_panel`, those without
    one before the others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                is_option = param.param_type_name == "option"
                panel = getattr(param, "rich_help_panel", None) or ("Options" if is_option else "Arguments")
                name = re.sub(r" <([^<>]+)>", _plain_type if is_option else "", record[0])
                sections.setdefault(panel, []).append((name, record[1]))
        _write(formatter, sections)


def _plain_type(match: re.Match[str]) -> str:
    kind = match[1].removesuffix(" range").removeprefix("list[").removesuffix("]")
    return f" {_PLAIN.get(kind, 'TEXT')}"


class Command(PlainHelp):
    """A command whose errors name its options."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UserError as error:
            options = {"overrides": "command line"}
            for param in self.params:
                if param.name and param.param_type_name == "option":
                    options[param.name] = max(param.opts, key=len)
                    options |= {f"{param.name}=False": name for name in param.secondary_opts}
            raise UserError(in_options(str(error), options)) from error


class SectionedGroup(TyperGroup):
    """Lists commands under their `rich_help_panel`, in the order in which they were registered."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the work, not of the alphabet."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = getattr(command, "rich_help_panel", None) or "Commands"
                sections.setdefault(title, []).append((name, command.get_short_help_str(limit=100)))
        _write(formatter, sections)


def _write(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, records in sections.items():
        if records:
            with formatter.section(title):
                formatter.write_dl(records)
