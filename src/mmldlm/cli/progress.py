"""Progress of `mmldlm prepare`: a live bar in a terminal, a plain line now and then anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10.0


class PrepareProgress:
    """Shows notes and the number of documents that are done, with rate and time left."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.live = self.console.is_terminal
        columns: tuple[Any, ...] = (
            TextColumn("encoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]:.0f}/s"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.live)
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

    def update(self, done: int, total: int) -> None:
        """Move the bar, or print a line every few seconds."""
        now = time.monotonic()
        if self.task is None:
            self.task = self.bar.add_task("encoding", total=total, rate=0.0)
            self.started_at, self.last_line_at, self.done_at_start = now, now, done
        rate = (done - self.done_at_start) / max(now - self.started_at, 1e-3)
        self.bar.update(self.task, completed=done, total=total, rate=rate)
        if not self.live and now - self.last_line_at >= LINE_SECONDS:
            self.last_line_at = now
            left = f", about {(total - done) / rate:.0f} s left" if rate else ""
            print(f"{done} of about {total} documents, {rate:.0f}/s{left}", file=sys.stderr, flush=True)
