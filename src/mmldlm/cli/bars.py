"""A progress bar for commands: live in a terminal, a line now and then elsewhere. Always on stderr."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_SECONDS = 10.0


class Bar:
    """`update(done, total)` is what the library takes as `progress`."""

    def __init__(self, title: str) -> None:
        self.title, self.console = title, Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("", total=None)
        self._next_line_at = time.monotonic() + LINE_SECONDS

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        """Move the bar."""
        self._bar.update(self._task, completed=done, total=total)
        if not self.console.is_terminal and time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + LINE_SECONDS
            self.console.print(f"{self.title}: {100 * done // max(total, 1)} %", highlight=False)
