"""A labelled log and what runwatch reports about it: found in time, missed, false."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from runwatch.settings import MonitorSettings
from runwatch.sources import find_runs
from runwatch.watch import RunWatch

START = 1_700_000_000.0
"""The hour at which simulated runs begin."""


@dataclass
class Label:
    """The truth about a log."""

    name: str
    expected: tuple[str, ...] = ()
    delay: int = 0
    """Steps within which each expected code must be found."""
    also: tuple[str, ...] = ()
    """What may be reported besides, because it is true as well."""
    from_step: int = 0
    real_clock: bool = False
    """The log was written just now by a process."""
    later: float = 0.0
    """Seconds that have passed since then."""


@dataclass
class Verdict:
    """What was reported about one log."""

    label: Label
    found: dict[str, int]
    """Expected codes that were found in time, with their delay in steps."""
    missed: tuple[str, ...]
    false: tuple[str, ...]


def judge(label: Label, path: Path) -> Verdict:
    """Read a log once and compare the alerts with its label."""
    now = time.time() + label.later if label.real_clock else START + 1e5
    run = RunWatch(find_runs([str(path)])[0], MonitorSettings(), clock=lambda: now)
    run.poll(live=False)
    run.close()
    in_time: dict[str, int] = {}
    false: set[str] = set()
    for alert in run.panel.book.alerts.values():
        late = (alert.first_step if alert.first_step is not None else label.from_step) - label.from_step
        if alert.code in label.expected and 0 <= late <= label.delay:
            in_time[alert.code] = min(in_time.get(alert.code, late), late)
        elif alert.code not in label.also and (late < 0 or alert.code not in label.expected):
            false.add(alert.code)  # too early is false too
    missed = tuple(code for code in label.expected if code not in in_time)
    return Verdict(label, in_time, missed, tuple(sorted(false)))
