"""How far a run is, and what the loop calls without knowing it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from mmldlm.data.loader import StepBatch
from mmldlm.model.denoiser import Denoiser

Fields = dict[str, Any]


class Reporter(Protocol):
    """Whoever shows the run to people."""

    def start(self, step: int, num_steps: int) -> None:
        """The run begins, or resumes, at a step."""
        ...

    def update(self, step: int, fields: Fields) -> None:
        """A line was logged."""
        ...


@dataclass
class Hooks:
    """Validation and decoding of samples, on the averaged weights; and whoever shows the run."""

    validate: Callable[[Denoiser], Fields]
    decode: Callable[[Denoiser, int], list[Fields]]
    reporter: Reporter
    leave: Callable[[int], Any] = os._exit
    """Ends the process at once with an exit code, when a step hangs and `train.step_timeout_action` is exit."""


@dataclass
class Progress:
    """How far a run is. Kept in checkpoints."""

    step: int = 0
    position: int = 0
    """In the order of documents."""
    tokens: int = 0
    documents: int = 0
    validated: list[Any] | None = None
    """Step and loss of the last validation."""

    def advance(self, batch: StepBatch) -> None:
        """A step was done."""
        self.step += 1
        self.position = batch.where.end
        self.tokens += batch.num_tokens
        self.documents += batch.num_documents

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in ({"validated": None} | dict(state)).items():
            setattr(self, name, value)
