"""The size of a micro-batch when memory runs out: half, and after a while twice as large again.

A step keeps its documents and its noise, so its loss does not change, only how many micro-batches it takes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from mmldlm.config import BatchConfig

log = logging.getLogger(__name__)


@dataclass
class Resizing:
    """How often the micro-batch is halved at present, and when it may grow."""

    config: BatchConfig
    halvings: int = 0
    good_steps: int = 0
    """Since the last change."""
    patience: int = 1
    """Growing waits this many times longer than `batch.grow_after`: it doubles whenever growing was too early."""
    _grew: bool = False

    def halve(self) -> None:
        """Memory ran out."""
        if self._grew:
            self.patience *= 2
        self.halvings, self.good_steps, self._grew = self.halvings + 1, 0, False

    def step_done(self) -> bool:
        """A step went well; true if the micro-batch is now twice as large."""
        self.good_steps += 1
        due = self.config.grow_after * self.patience
        if not self.halvings or not due or self.good_steps < due:
            return False
        self.halvings, self.good_steps, self._grew = self.halvings - 1, 0, True
        return True

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "halvings": self.halvings,
            "good_steps": self.good_steps,
            "patience": self.patience,
            "grew": self._grew,
        }

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint; a run that did not have this yet had its full size."""
        self.halvings, self.good_steps = state.get("halvings", 0), state.get("good_steps", 0)
        self.patience, self._grew = state.get("patience", 1), state.get("grew", False)
