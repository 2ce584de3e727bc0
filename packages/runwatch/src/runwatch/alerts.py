"""The book of alerts of one run: one entry for each thing that is wrong, however often it is seen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from runwatch.catalogue import BY_CODE, LEVELS
from runwatch.settings import MonitorSettings


@dataclass
class Alert:
    """Something wrong: since when, how often, how sure, and why we think so."""

    code: str
    level: str
    subject: str
    first_step: int | None
    last_step: int | None
    first_time: float | None
    last_time: float | None
    evidence: str
    sure: float
    count: int = 1
    status: str = "open"
    resolved_step: int | None = None
    sent_time: float = -math.inf
    last_line: int = 0
    own: bool = False
    """The run is one of MM-LDLM's trainer, so that advice may name its settings."""

    @property
    def name(self) -> str:
        return BY_CODE[self.code].name

    def as_dict(self) -> dict[str, Any]:
        """For machines: the alert with all that a reader needs."""
        kind = BY_CODE[self.code]
        return {
            "code": self.code, "name": kind.name, "level": self.level, "status": self.status,
            "subject": self.subject, "first_step": self.first_step, "last_step": self.last_step,
            "first_time": self.first_time, "last_time": self.last_time, "resolved_step": self.resolved_step,
            "count": self.count, "sure": self.sure, "meaning": kind.meaning, "evidence": self.evidence,
            "advice": (self.own and kind.own_advice) or kind.advice, "page": f"docs/codes.md#{self.code.lower()}",
        }  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Something to tell: an alert was opened, got worse, is still there after the cool-down, or is over."""

    what: str
    alert: Alert
    step: int | None = None
    time: float | None = None
    evidence: str = ""
    """As it was then; the alert itself goes on changing."""


class AlertBook:
    """Detectors fire and clear; the book keeps one alert per (code, subject) and says what is news."""

    def __init__(self, settings: MonitorSettings, *, own: bool = False) -> None:
        self.settings, self.own = settings, own
        self.alerts: dict[tuple[str, str], Alert] = {}
        self.num_lines = 0
        self.step: int | None = None
        self.time: float | None = None
        self._news: list[Change] = []

    def advance(self, step: int | None, time: float | None, *, counts: bool = True) -> None:
        """A line of the curve was read; passing events that did not come again are over.

        A line that holds no loss, such as a redrawn bar, does not count.
        """
        self.step = step if step is not None else self.step
        self.time = time if time is not None else self.time
        self.num_lines += counts
        if self.alerts:
            for alert in self.open():
                quiet = self.num_lines - alert.last_line
                if BY_CODE[alert.code].passing and quiet >= self.settings.resolve_lines:
                    self._resolve(alert)

    def fire(
        self,
        code: str,
        evidence: str,
        *,
        sure: float = 0.99,
        level: str = "",
        subject: str = "",
        step: int | None = None,
    ) -> Alert:
        """Something is wrong at a step, by default the present one; called as long as it is."""
        step = self.step if step is None else step
        level = level or BY_CODE[code].level
        alert = self.alerts.get((code, subject))
        if alert is None:
            alert = Alert(code, level, subject, step, step, self.time, self.time, evidence, sure)
            alert.own = self.own
            self.alerts[code, subject] = alert
            self._tell("opened", alert)
        else:
            self._again(alert, step, evidence, sure, level)
        alert.last_line = self.num_lines
        return alert

    def _again(self, alert: Alert, step: int | None, evidence: str, sure: float, level: str) -> None:
        reopened, worse = alert.status == "resolved", LEVELS.index(level) > LEVELS.index(alert.level)
        alert.count += 1
        alert.last_step, alert.last_time = step, self.time
        alert.status, alert.resolved_step = "open", None
        if sure >= alert.sure or worse:
            alert.sure, alert.evidence = sure, evidence
        if worse:
            alert.level = level
            self._tell("worse", alert)
        elif (self.time or 0.0) - alert.sent_time >= self.settings.cooldown_seconds:
            self._tell("opened" if reopened else "still", alert)

    def clear(self, code: str, subject: str = "") -> None:
        """It is over, if it was open at all."""
        alert = self.alerts.get((code, subject))
        if alert is not None and alert.status == "open":
            self._resolve(alert)

    def _resolve(self, alert: Alert) -> None:
        alert.status, alert.resolved_step = "resolved", self.step
        self._note("resolved", alert)

    def _tell(self, what: str, alert: Alert) -> None:
        alert.sent_time = self.time if self.time is not None else 0.0
        self._note(what, alert)

    def _note(self, what: str, alert: Alert) -> None:
        step = self.step if what == "resolved" else alert.last_step
        self._news.append(Change(what, alert, step, self.time, alert.evidence))

    def is_open(self, code: str, subject: str = "") -> bool:
        alert = self.alerts.get((code, subject))
        return alert is not None and alert.status == "open"

    def open(self) -> list[Alert]:
        """What is wrong now, worst first."""
        chosen = [alert for alert in self.alerts.values() if alert.status == "open"]
        return sorted(chosen, key=lambda alert: -LEVELS.index(alert.level)) if len(chosen) > 1 else chosen

    def worst(self, *, only_open: bool = False) -> str | None:
        """The highest level there is, or was."""
        chosen = self.open() if only_open else list(self.alerts.values())
        return max((alert.level for alert in chosen), key=LEVELS.index, default=None)

    def take_news(self) -> list[Change]:
        """What there is to tell since the last call."""
        news, self._news = self._news, []
        return news
