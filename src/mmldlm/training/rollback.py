"""Back to the last good checkpoint, when too many updates had to be skipped.

A skipped update changes nothing, so one is harmless. Many in a row mean that the weights, or the data that follows,
cannot be trained on. Then the run returns to a checkpoint that was saved while all was well, leaves out the data on
which it failed, and goes on, with a smaller learning rate if told. All of this is part of the next checkpoint.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmldlm.checkpoint.files import DamagedError, published
from mmldlm.checkpoint.load import load_checkpoint
from mmldlm.checkpoint.state import Snapshot
from mmldlm.data.loader import StepRange
from mmldlm.errors import UserError
from mmldlm.training.setup import Setup

log = logging.getLogger(__name__)

MOST_IDS = 1000
"""Documents that an event names; positions say the rest."""
_REMEMBERED = 1000


def over_budget(budget: int, skipped: int, longest: int) -> bool:
    """Whether too many updates were skipped: in a row, or between two lines of the log."""
    return max(skipped, longest) >= budget


@dataclass
class Rollbacks:
    """What earlier rollbacks mean for the steps to come; a checkpoint keeps it."""

    count: int = 0
    lr_factor: float = 1.0
    left_out: list[list[int]] = field(default_factory=list)
    """Stretches of positions in the order of documents that were never trained on."""
    last_step: int | None = None
    """Where the last one led to."""

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint; a run that did not have this yet never went back."""
        fresh = asdict(Rollbacks()) | state
        for name, value in fresh.items():
            setattr(self, name, value)

    def went(self, to_step: int, left_out: tuple[int, int], lr_factor: float) -> None:
        """A rollback was done."""
        self.count += 1
        self.lr_factor *= lr_factor
        self.left_out.append(list(left_out))
        self.last_step = to_step

    def choose(self, folder: Path, report: Callable[[str], None]) -> Snapshot | None:
        """The newest good checkpoint; an older one, where the newest is the one that did not help last time."""
        good = [path for path in reversed(published(folder)) if is_good(path)]
        steps = {path: int(path.name.rpartition("_")[2]) for path in good}
        if good and self.last_step is not None and steps[good[0]] <= self.last_step:
            good.sort(key=lambda path: steps[path] >= (self.last_step or 0))  # stable: older ones first
        for path in good:
            try:
                return load_checkpoint(path)
            except DamagedError as error:
                report(f"{error}; trying an older checkpoint")
        return None


def is_good(path: Path) -> bool:
    """Whether a checkpoint was saved while updates were not being skipped."""
    try:
        sums = load_checkpoint(path, groups=("log",)).tensors.get("log", {})
    except UserError:
        return False
    return float(sums.get("streak", torch.zeros(()))) == 0.0


@dataclass
class BadSteps:
    """Which of the steps since the last line of the log were skipped. The flags stay on the device until asked for.

    A checkpoint keeps them, so that a run that ends between two lines names their documents when it goes on.
    """

    recent: deque[tuple[StepRange, Tensor]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def add(self, where: StepRange, skipped: Tensor) -> None:
        """A step was done."""
        self.recent.append((where, skipped))

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint, with names of their own; nothing waits for the device."""
        if not self.recent:
            return {}
        places = [[where.start, where.end, where.step] for where, _ in self.recent]
        flags = torch.stack([flag.reshape(()) for _, flag in self.recent])
        return {"recent_places": torch.tensor(places), "recent_skipped": flags}

    def load(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        """What `tensors` gave; a checkpoint without it knows of no step."""
        self.recent.clear()
        if "recent_places" in tensors:
            flags = tensors["recent_skipped"].to(device).unbind()
            for place, flag in zip(tensors["recent_places"].tolist(), flags, strict=True):
                self.recent.append((StepRange(*place), flag))

    def take(self, *, wanted: bool) -> list[StepRange]:
        """The skipped ones, if wanted, which waits for the device; all are forgotten."""
        recent = list(self.recent)
        self.recent.clear()
        if not wanted or not recent:
            return []
        flags = torch.stack([flag.reshape(()) for _, flag in recent]).tolist()
        return [where for (where, _), flag in zip(recent, flags, strict=True) if flag]


def describe_documents(setup: Setup, bad: list[StepRange]) -> dict[str, Any]:
    """Steps, positions and document ids of steps, for the ledger."""
    ids: list[int] = []
    for where in bad:
        if len(ids) >= MOST_IDS:
            break
        positions = torch.arange(where.start, where.end).numpy()[: MOST_IDS - len(ids)]
        ids += setup.train_split.read(setup.order.documents(positions)).ids.tolist()
    return {
        "steps": [where.step + 1 for where in bad],
        "positions": [[where.start, where.end] for where in bad],
        "documents": ids,
    }
