"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math

from mmldlm.config import OptimConfig


def lr_at(step: int, num_steps: int, config: OptimConfig) -> float:
    """Learning rate of update number `step`, counted from 0: linear warm-up, then a cosine to `min_lr_ratio`.

    A warm-up longer than the run is allowed; the run then ends before the rate is reached.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * cosine)
