"""Tables of plain cells: the same one for the terminal, for Markdown and for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable

PIPE_WIDTH = 120
"""Columns where the output is no terminal."""


@dataclass(frozen=True)
class Table:
    """Rows under a head. The first column names the row; numbers in the others are aligned to the right."""

    title: str
    about: str
    head: list[str]
    rows: list[list[str]]

    def to_markdown(self) -> str:
        """The table under a heading."""
        lines = [f"## {self.title}", "", _escape(self.about), "", *markdown_rows(self.head, self.rows)]
        return "\n".join(lines) + "\n"

    def to_rich(self) -> RichTable:
        """For a terminal."""
        table = folding_table(*self.head, title=self.title, numbers=True)
        for row in self.rows:
            add_row(table, row)
        return table


def markdown_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(map(_escape, row)) + " |" for row in (head, marks, *rows)]


def folding_table(*head: str, title: str, numbers: bool = False) -> RichTable:
    """A rich table whose cells continue on the next line in a narrow terminal; brackets in its title are no markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=Text(title), title_justify="left")
    for idx, column in enumerate(head):
        table.add_column(Text(column), overflow="fold", justify="right" if numbers and idx else "left")
    return table


def add_row(table: RichTable, cells: Iterable[str]) -> None:
    """Cells are text, never markup."""
    from rich.text import Text

    table.add_row(*map(Text, cells))


def show_tables(tables: Iterable[Table], before: Iterable[str] = (), after: Iterable[str] = ()) -> None:
    """Print lines, tables and lines on stdout."""
    from rich.text import Text

    console = wide_console()
    for line in before:
        console.print(Text(line), soft_wrap=True)
    for table in tables:
        console.print(table.to_rich())
    for line in after:
        console.print(Text(line), soft_wrap=True)


def wide_console() -> Console:
    """stdout: a terminal with its own width, a pipe with a fixed one."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=PIPE_WIDTH)


def number(value: float) -> str:
    """A number that may be large or infinite."""
    if not value < float("inf"):
        return "∞"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def percent(value: float, digits: int = 1) -> str:
    """A share."""
    return f"{100 * value:.{digits}f} %"


def signed(value: float, digits: int = 3) -> str:
    """A difference."""
    return f"{value:+.{digits}f}".replace("-", "−")


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
