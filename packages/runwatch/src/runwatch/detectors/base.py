"""What a detector is: it sees every record of a run and writes into its book of alerts."""

from __future__ import annotations

from dataclasses import dataclass

from runwatch.alerts import AlertBook
from runwatch.records import Record
from runwatch.settings import MonitorSettings


@dataclass
class RunFacts:
    """What is known about a run besides its lines; all of it may be missing."""

    total_steps: int | None = None
    total_is_sure: bool = True
    """Whether the run ends there; a bar may be that of one epoch."""
    checkpoint_every: int | None = None
    lr_restarts: bool = False
    """The learning rate is meant to fall and jump back, over and over."""
    saved_step: int | None = None
    """Step of the newest checkpoint that lies on the disk."""
    ended: str = ""
    """finished, stopped or crashed once that is known."""
    alive: bool | None = None
    """Whether its process exists; None: cannot be known from here."""


class Detector:
    """One kind of trouble. No input or output, no clock of its own: records and ticks are all it knows."""

    def __init__(self, settings: MonitorSettings, book: AlertBook, facts: RunFacts) -> None:
        self.settings, self.book, self.facts = settings, book, facts

    needs: frozenset[str] | None = None
    """Values without any of which a line means nothing to it; None: every line does."""
    compares = False
    """Whether it holds losses or gradients against earlier ones, which means nothing when other losses exist."""

    def line(self, record: Record) -> None:
        """A line of the curve, of the main rank."""

    def event(self, record: Record) -> None:
        """An event of the ledger or a message, of any rank."""

    def rank_line(self, record: Record) -> None:
        """A line of the curve of any rank, when there are several."""

    def tick(self, now: float, *, live: bool) -> None:
        """Time passes without lines. `live`: the log is being followed; else it was only read once."""
