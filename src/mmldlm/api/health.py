"""The monitor's detectors inside the training process: what they find goes to the ledger and the log as it happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from runwatch.alerts import Change
from runwatch.detectors import Panel
from runwatch.detectors.base import RunFacts

from mmldlm.config import Config

log = logging.getLogger(__name__)
_LEVELS = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class Health:
    """Judges every logged line, as `mmldlm monitor` does from outside, and records what is news."""

    def __init__(self, config: Config, record: Callable[..., None], saved: Callable[[], int | None]) -> None:
        self.record, self.saved = record, saved
        self.facts = RunFacts(
            total_steps=config.train.steps,
            checkpoint_every=config.train.checkpoint_every,
            lr_restarts=config.optim.schedule == "restarts",
        )
        self.panel = Panel(facts=self.facts, own=True)

    def update(self, step: int, fields: dict[str, Any]) -> None:
        """A line was logged."""
        self.facts.saved_step = self.saved()
        for change in self.panel.observe_fields(step, fields, time=time.time()):
            self._tell(change, step)

    def _tell(self, change: Change, step: int) -> None:
        alert = change.alert.as_dict()
        kept = {
            key: alert[key] for key in ("code", "name", "level", "subject", "first_step", "count", "advice")
        }
        self.record("alert", step=step, what=change.what, evidence=change.evidence, **kept)
        level = logging.INFO if change.what == "resolved" else _LEVELS[alert["level"]]
        log.log(
            level, "step %d: %s %s %s: %s; %s", step, change.what, alert["code"], alert["name"], change.evidence,
            alert["advice"],
        )  # fmt: skip
