"""The times that a sampler visits, from noise to clean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

Modality = Literal["text", "latent"]


@dataclass(frozen=True)
class Step:
    """One move of one modality to an earlier time."""

    modality: Modality
    time: float
    next_time: float
    step_idx: int


def make_steps(modality: Modality, num_steps: int, latest_time: float = 1.0) -> list[Step]:
    """Equal steps from the latest time to 0."""
    times = np.linspace(latest_time, 0.0, num_steps + 1)
    return [Step(modality, float(times[i]), float(times[i + 1]), i) for i in range(num_steps)]


def interleave(latent_steps: list[Step], text_steps: list[Step]) -> list[Step]:
    """Both chains in one order: whichever would be later in time moves next, the latent before the text."""
    steps = [*latent_steps, *text_steps]
    return sorted(steps, key=lambda step: (-step.next_time, step.modality))
