"""Progress of a command: a live bar in a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

LINE_SECONDS = 10.0


class ProgressBar:
    """A progress callback: call it with what is done and the total."""

    def __init__(self, title: str, *, unit: str | None = None, visible: bool = True) -> None:
        """`unit`: what is counted, such as documents, shown with its rate; None: only the share is shown."""
        self.title, self.unit, self.visible = title, unit, visible
        self.console = Console(stderr=True)
        self.live = visible and self.console.is_terminal
        counted: tuple[Any, ...] = (TaskProgressColumn(),)
        if unit is not None:
            counted = (MofNCompleteColumn(), TextColumn("{task.fields[rate]:.0f}/s"))
        columns = (TextColumn(title, markup=False), BarColumn(), *counted, TimeRemainingColumn())
        self.bar = Progress(*columns, console=self.console, disable=not self.live, transient=unit is None)
        self.task: Any = None
        self.started_at = self.last_line_at = 0.0
        self.done_at_start = 0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def note(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __call__(self, done: int, total: int) -> None:
        """Move the bar, or print a line every few seconds."""
        now = time.monotonic()
        if self.task is None:
            self.task = self.bar.add_task(self.title, total=total, rate=0.0)
            self.started_at, self.last_line_at, self.done_at_start = now, now, done
        rate = (done - self.done_at_start) / max(now - self.started_at, 1e-3)
        self.bar.update(self.task, completed=done, total=total, rate=rate)
        if self.visible and not self.live and now - self.last_line_at >= LINE_SECONDS:
            self.last_line_at = now
            print(self._line(done, total, rate), file=sys.stderr, flush=True)

    def _line(self, done: int, total: int, rate: float) -> str:
        left = f", about {(total - done) / rate:.0f} s left" if rate else ""
        if self.unit is None:
            return f"{self.title}: {100 * done // max(total, 1)} %{left}"
        return f"{self.title}: {done} of about {total} {self.unit}, {rate:.0f}/s{left}"
