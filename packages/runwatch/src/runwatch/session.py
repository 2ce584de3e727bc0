"""Watching several runs: look, tell, wait, until all have ended or somebody says stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from runwatch.alerts import Change
from runwatch.errors import UserError
from runwatch.settings import MonitorSettings
from runwatch.sinks import Message, is_wanted, message_of
from runwatch.sources import RunSource, find_runs
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
        mapped: Mapping[str, str] | None = None,
        folders: list[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self.mapped, self.folders = settings, mapped or {}, folders or []
        self.sinks, self.notify, self.clock = sinks or [], notify, clock
        self.runs = [self._watch(source) for source in sources]
        self._looked = False

    def _watch(self, source: RunSource) -> RunWatch:
        return RunWatch(source, self.settings, mapped=self.mapped, clock=self.clock)

    def look(self, *, live: bool) -> list[tuple[RunWatch, Change]]:
        """Read what is new in all runs; returns the news after sending it."""
        if live and self.folders and self._looked:
            self._add_new_logs()
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

    def _add_new_logs(self) -> None:
        """Logs that appeared in a watched folder are runs of their own."""
        known = {file.path for run in self.runs for file in run.source.files}
        for folder in self.folders:
            with contextlib.suppress(UserError):
                for source in find_runs([folder]):
                    if not known & {file.path for file in source.files}:
                        self.runs.append(self._watch(source))

    def ended(self) -> bool:
        """Whether every run has come to its end."""
        return all(run.is_over() for run in self.runs)

    def shown(self) -> list[RunWatch]:
        """All runs, but files of a folder that turn out not to be logs only where nothing else is one."""
        logs = [run for run in self.runs if not run.source.is_guess or run.says_something()]
        return logs or self.runs

    def state(self, *, curves: bool = False) -> dict[str, Any]:
        """Everything, as plain data."""
        shown = self.shown()
        left_out = [str(run.source.path) for run in self.runs if run not in shown]
        return whole_state(shown, curves=curves) | {"without_loss": left_out}

    def worst(self) -> str | None:
        """The highest level of anything that was found, resolved or not."""
        order = [None, "info", "warn", "error"]
        books = [run.panel.book for watch in self.runs for run in watch.runs()]
        return max((book.worst() for book in books), key=order.index, default=None)

    def cannot_judge(self) -> bool:
        """Whether there is a run of which no loss was read."""
        return any(not run.num_losses for watch in self.shown() for run in watch.runs())

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()
        for run in self.runs:
            run.close()
