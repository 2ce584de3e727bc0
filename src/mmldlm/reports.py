"""What reports are made of: tables, pictures, and pages of one HTML file that needs nothing else.

A table is the same for the terminal, Markdown and a page. A picture is drawn once: as SVG that takes the page's
colours, and as PNG for anywhere else. Templates of pages are in `templates/`; everything from data is escaped.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmldlm.durable import flush_folder, naming, staged_file, staged_folder, write_file

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console
    from rich.table import Table as RichTable


PIPE_WIDTH = 160
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
        from rich.text import Text

        table = folding_table(*self.head, title=self.title, numbers=True)
        for row in self.rows:
            table.add_row(*map(Text, row))  # text, never markup
        return table


def markdown_rows(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return ["| " + " | ".join(map(_escape, row)) + " |" for row in (head, marks, *rows)]


def counted(number: int, word: str) -> str:
    """A number and what it counts.

    >>> counted(1, "document"), counted(1200, "document")
    ('1 document', '1,200 documents')
    """
    return f"{number:,} {word if number == 1 else word + 's'}"


def folding_table(*head: str, title: str, numbers: bool = False) -> RichTable:
    """A rich table whose cells continue on the next line in a narrow terminal; brackets in its title are no markup."""
    from rich.table import Table as RichTable
    from rich.text import Text

    table = RichTable(title=Text(title), title_justify="left")
    for idx, column in enumerate(head):
        table.add_column(Text(column), overflow="fold", justify="right" if numbers and idx else "left")
    return table


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
    return f"{100 * value:.{digits}f} %"


def signed(value: float, digits: int = 3) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Ink and grid lines are replaced by the page's own colours in the SVG; the others suit light and dark pages.
INK, GRID = "#1c2733", "#d5dbe1"
BLUE, ORANGE, GREY, GREEN = "#3d7fd6", "#e07b39", "#8b96a3", "#2a9d78"
_SIZE = (5.4, 3.3)
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "lines.linewidth": 1.8,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Picture:
    name: str
    title: str
    caption: str
    svg: str
    """For a page, whose colours it takes."""
    png: bytes
    wide: bool = False
    """Whether a page gives it a row of its own."""


def make_picture(name: str, title: str, caption: str, draw: Callable[[Axes], None]) -> Picture:
    """Draw on one pair of axes."""
    return make_panels(name, title, caption, [draw])


def make_panels(name: str, title: str, caption: str, draws: Sequence[Callable[[Axes], None]]) -> Picture:
    """Draw on axes one above the other, which share what runs to the right."""
    size = _SIZE if len(draws) == 1 else (1.3 * _SIZE[0], 0.6 * len(draws) * _SIZE[1])

    def draw_panels(figure: Figure) -> None:
        panels = figure.subplots(len(draws), sharex=True, squeeze=False)[:, 0]
        for draw, axes in zip(draws, panels, strict=True):
            draw(axes)

    return make_figure(name, title, caption, size, draw_panels, wide=len(draws) > 1)


def make_figure(
    name: str,
    title: str,
    caption: str,
    size: tuple[float, float],
    draw: Callable[[Figure], None],
    *,
    wide: bool = True,
) -> Picture:
    """Draw on a whole figure of this size in inches."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        return Picture(name, title, caption, _to_svg(figure), _to_png(figure), wide)


def explain_colours(figure: Figure, colours: Mapping[str, str]) -> None:
    """A legend above a whole figure."""
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for label, colour in colours.items()]
    figure.legend(handles=patches, loc="outside upper right", ncols=len(patches), fontsize=8)


def _to_svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--line)")
    return text.replace("<svg ", '<svg role="img" ', 1)


def _to_png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Card:
    value: str
    what: str
    detail: str


def render_page(
    title: str,
    *,
    intro: Sequence[str] = (),
    cards: Sequence[Card] = (),
    notes: Sequence[str] = (),
    pictures: Sequence[Picture] = (),
    tables: Sequence[Table] = (),
    command: str | None = None,
    details: Mapping[str, Mapping[str, Any]] | None = None,
    template: str = "page.html",
    **more: Any,
) -> bytes:
    """The page in UTF-8; `more` are the variables of a template that extends the base."""
    page = _environment().get_template(template)
    text = page.render(
        title=title, intro=intro, cards=cards, notes=notes, pictures=pictures, tables=tables, command=command,
        details=details or {}, **more,
    )  # fmt: skip
    return text.encode("utf-8", "replace")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("mmldlm"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"flat": _flat, "inline": _inline}
    return environment


def _inline(text: str) -> Markup:
    """Words in backticks as code; everything is escaped."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def _flat(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_flat(item)}" for key, item in value.items())
    return ", ".join(map(_flat, value)) if isinstance(value, list | tuple) else str(value)


def publish(folder: Path, files: dict[str, bytes], stale: list[str] | None = None) -> None:
    """Put files into a folder all together: written to a staging folder first, so that a full disk changes nothing.

    A new folder appears whole. In one that exists already each file is renamed into its place, in the given order, and
    those of `stale` that are not among them go; other files are left alone.
    """
    if not folder.is_dir():
        with staged_folder(folder) as staged:
            for name, content in files.items():
                write_file(staged / name, [content])
        return
    with (
        contextlib.ExitStack() as stack,
        naming(folder),
    ):  # the last one entered is the first that gets its name
        for name, content in reversed(files.items()):
            write_file(stack.enter_context(staged_file(folder / name, flushed=False)), [content])
    for name in set(stale or []) - files.keys():
        (folder / name).unlink(missing_ok=True)
    flush_folder(folder)
