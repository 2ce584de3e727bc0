"""What `mmldlm sample` shows: a progress bar while it works, a table when it is done."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmldlm.sampling.records import Samples

LINE_SECONDS = 10.0
TITLES = {
    "at": "at",
    "original": "original",
    "infill": "blanks",
    "text": "text",
    "cosine": "cosine",
    "neighbours": "nearest training texts",
}


def show(samples: Samples, out: Path | None) -> None:
    """A table for people: the original beside what became of it."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    first = samples.records[0]
    titles = TITLES | {"text": "decoded" if "original" in first else "text"}
    columns = [name for name in titles if first.get(name) is not None]
    table = Table(show_lines=True)
    for name in columns:
        table.add_column(titles[name], overflow="fold")
    for record in samples.records:
        table.add_row(*[Text(_cell(record[name])) for name in columns])
    console = Console()
    console.print(table)
    if out is not None:
        console.print(Text(f"written to {out}"), soft_wrap=True)
    elif samples.latents is not None:
        console.print(Text("the latents themselves: --out FILE.npy"), soft_wrap=True)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(f"{near['cosine']:.4f} {near['text'] or '-'}" for near in value)
    return f"{value:.4f}" if isinstance(value, float) else str(value)


class Bar:
    """A progress bar in a terminal; elsewhere nothing, or for long work a plain line now and then."""

    def __init__(self, what: str, wanted: bool, *, lines: bool = False) -> None:
        from rich.console import Console
        from rich.progress import Progress

        console = Console(stderr=True)
        self._lines = lines and not console.is_terminal
        self._what, self._last_line_at = what, time.monotonic()
        self._progress = Progress(
            console=console, transient=True, disable=not (wanted and console.is_terminal)
        )
        self._task = self._progress.add_task(what, total=None)

    def __call__(self, done: float, total: float) -> None:
        self._progress.update(self._task, completed=done, total=total)
        now = time.monotonic()
        if self._lines and now - self._last_line_at >= LINE_SECONDS:
            self._last_line_at = now
            print(f"{self._what}: {done:.0f} of {total:.0f}", file=sys.stderr, flush=True)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._progress.stop()
