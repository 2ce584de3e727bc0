"""Plain help under headings, for commands with many options and for the list of commands."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class SectionedCommand(TyperCommand):
    """Lists arguments first, then options under their `rich_help_panel`, those without one before the others."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Called for `--help`."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                plain = "Options" if param.param_type_name == "option" else "Arguments"
                sections.setdefault(getattr(param, "rich_help_panel", None) or plain, []).append(record)
        _write(formatter, sections)


class SectionedGroup(TyperGroup):
    """Lists commands under their `rich_help_panel`, in the order in which they were registered."""

    def list_commands(self, ctx: Any) -> list[str]:
        """In the order of the work, not of the alphabet."""
        return list(self.commands)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Called for `--help`."""
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
