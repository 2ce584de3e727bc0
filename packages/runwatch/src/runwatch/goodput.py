"""Where the wall time of a run went: useful steps, and the rest by cause."""

from __future__ import annotations

import math
from typing import Any

from runwatch.history import Recent, Window
from runwatch.records import Record

CAUSES = ("useful", "data", "start", "compile", "evaluation", "checkpoint", "recovery", "other")


class TimeLedger:
    """Adds up time, line by line.

    The time of a line's own steps follows from its rate (ours leave validation and saving out); what is left of the
    interval belongs to what happened in it.
    """

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(CAUSES, 0.0)
        self.first: float | None = None
        self.last: float | None = None
        self._cause = "start"
        self._before: Record | None = None
        self._start_step = 0
        self._usual, self._pace = Window(64), Recent(64)
        self._hung = False

    def event(self, record: Record) -> None:
        """Starts, resumes, checkpoints and compilation explain the time until the next line."""
        if record.event in ("started", "resumed", "rolled_back") and record.time is not None:
            self._restart(record)
        elif record.event == "compile":
            self._cause = "compile"
        elif record.event == "hung_step":
            self._cause, self._hung = "recovery", True
        elif record.event in ("checkpoint", "saved", "save_failed") and self._cause == "other":
            self._cause = "checkpoint"
        elif record.event in ("finished", "stopped") and record.time is not None and self.last is not None:
            self._spend(self._cause if self._cause != "other" else "checkpoint", record.time)

    def _restart(self, record: Record) -> None:
        at = record.time or 0.0
        self._spend("recovery", at)
        before = self._before
        done = before.step if before is not None and before.step is not None else 0
        if record.step is not None and done > record.step:
            moved = self.seconds["useful"] * (done - record.step) / done  # work that is done again
            self.seconds["useful"] -= moved
            self.seconds["recovery"] += moved
        self._start_step = record.step or 0
        self._before, self._cause = None, "start" if record.event != "rolled_back" else "recovery"

    def line(self, record: Record) -> None:
        """A line with a time; others say nothing about it."""
        if record.time is None:
            return
        if "loss" not in record.values:
            self._spend("evaluation" if "valid_loss" in record.values else self._cause, record.time)
            return
        since = self.last if self.last is not None else record.time
        elapsed = max(0.0, record.time - since)
        busy = self._without_hang(self._busy(record, elapsed), record)
        wait = record.values.get("data_wait", 0.0)
        waited = busy * min(max(wait, 0.0), 1.0) if math.isfinite(wait) else 0.0
        self.seconds["useful"] += busy - waited
        self.seconds["data"] += waited
        self._spend(self._cause, record.time, less=busy)
        self._before, self._cause = record, "other"

    def _busy(self, record: Record, elapsed: float) -> float:
        """Seconds of this interval that its own steps took."""
        before = self._before
        start = before.step if before is not None and before.step is not None else self._start_step
        steps = (record.step or 0) - start
        if steps <= 0:
            return 0.0 if before is None else elapsed
        for total, rate in (("tokens", "tokens_per_second"), ("documents", "documents_per_second")):
            done, speed = record.values.get(total), record.values.get(rate)
            if done and speed and record.step:
                share = steps / record.step  # of all that was done since step 0, which needs no line before
                return min(elapsed, done * share / speed)
        seconds = record.values.get("step_seconds") or 1 / (record.values.get("steps_per_second") or math.inf)
        if seconds > 0:
            return min(elapsed, steps * seconds)
        if before is None:
            return 0.0
        self._usual.add(elapsed / steps)
        return min(elapsed, 2 * steps * self._usual.median())

    def _without_hang(self, busy: float, record: Record) -> float:
        """A step that hung took what steps usually take; the rest of its time was lost."""
        before, hung, self._hung = self._before, self._hung, False
        steps = record.step - before.step if before and before.step and record.step else 0
        if steps <= 0:
            return busy
        if hung and len(self._pace):
            return min(busy, steps * self._pace.median())
        self._pace.add(busy / steps)
        return busy

    def _spend(self, cause: str, until: float, *, less: float = 0.0) -> None:
        self.first = until if self.first is None else self.first
        if self.last is not None and until > self.last:
            self.seconds[cause] += max(0.0, until - self.last - less)
        self.last = until if self.last is None else max(self.last, until)

    def summary(self) -> dict[str, Any] | None:
        """Shares of the wall time; None if the log tells no time."""
        wall = sum(self.seconds.values())
        if wall <= 0 or self.first is None or self.last is None:
            return None
        shares = {cause: round(seconds / wall, 4) for cause, seconds in self.seconds.items()}
        return {
            "wall_seconds": round(wall, 1),
            "goodput": shares["useful"],
            "seconds": {cause: round(seconds, 1) for cause, seconds in self.seconds.items()},
            "shares": shares,
        }
