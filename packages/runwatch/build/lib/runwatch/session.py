"""Watching several runs: look, tell, wait, until all have ended or somebody says stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from runwatch.alerts import Change
from runwatch.settings import MonitorSettings
from runwatch.sinks import Message, is_wanted, message_of
from runwatch.sources import RunSource
from runwatch.state import whole_state
from runwatch.watch import RunWatch


class Sink(Protocol):
    """Somewhere alerts go to."""

    def send(self, message: Message) -> None:
        """Take one message; must not wait."""
        ...

    def close(self) -> None:
        """Deliver what is left."""
        ...


class Session:
    """The runs under watch and where their alerts go."""

    def __init__(
        self,
        sources: list[RunSource],
        settings: MonitorSettings,
        *,
        sinks: list[Sink] | None = None,
        notify: str = "warn",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.runs = [RunWatch(source, settings, clock=clock) for source in sources]
        self.sinks, self.notify, self.clock = sinks or [], notify, clock
        self._looked = False

    def look(self, *, live: bool) -> list[tuple[RunWatch, Change]]:
        """Read what is new in all runs; returns the news after sending it."""
        news = [(run, change) for run in self.runs for change in run.poll(live=live)]
        if not self._looked and live:  # of the past, only what is still wrong is news
            news = [
                (run, change)
                for run, change in news
                if change.alert.status == "open" and change.what == "opened"
            ]
        self._looked = True
        for run, change in news:
            if is_wanted(change, self.notify):
                for sink in self.sinks:
                    sink.send(message_of(run.source.name, change, self.clock()))
        return news

    def ended(self) -> bool:
        """Whether every run has come to its end."""
        return all(run.is_over() for run in self.runs)

    def state(self, *, curves: bool = False) -> dict[str, Any]:
        """Everything, as plain data."""
        return whole_state(self.runs, curves=curves)

    def worst(self) -> str | None:
        """The highest level of anything that was found, resolved or not."""
        order = [None, "info", "warn", "error"]
        return max((run.panel.book.worst() for run in self.runs), key=order.index, default=None)

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        for run in self.runs:
            run.close()
