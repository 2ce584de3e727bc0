"""The learning rate as a pure function of the step; under `plateau` of the losses recorded so far as well.

After a linear warm-up every schedule gives a level, a share of `optim.lr`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mmldlm.config import Config, OptimConfig


def lr_at(step: int, num_steps: int, config: OptimConfig, reduction: float = 1.0) -> float:
    """Learning rate of update number `step`, counted from 0: linear warm-up, then what the schedule says.

    A warm-up longer than the run is allowed; the run then ends before the rate is reached. `reduction` is what the
    plateau schedule has come to; the others do not look at it.
    """
    peak = config.lr
    if config.schedule == "plateau":
        peak = max(config.lr * reduction, min(config.lr, config.plateau_min_lr))
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    return peak * _LEVELS[config.schedule](step, num_steps, config)


def _cosine(step: int, num_steps: int, config: OptimConfig) -> float:
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    return _falling(_half_wave(min(1.0, progress)), config)


def _restarts(step: int, num_steps: int, config: OptimConfig) -> float:
    """Cosine after cosine, number k of `restart_period * restart_factor^k` steps, wherever the run ends."""
    since, length = step - config.warmup_steps, config.restart_period
    if config.restart_factor == 1.0:
        since %= length
    exact = float(length)
    while since >= length:
        since -= length
        exact *= config.restart_factor
        length = round(exact)
    return _falling(_half_wave(since / length), config)


def _wsd(step: int, num_steps: int, config: OptimConfig) -> float:
    """1, and in the last `decay_share` of the steps a straight line down, that ends where the run does."""
    decay_steps = max(1, round(config.decay_share * num_steps))
    begin = max(num_steps - decay_steps, config.warmup_steps)
    return _falling(min(1.0, max(0.0, (num_steps - step) / max(1, num_steps - begin))), config)


def _constant(step: int, num_steps: int, config: OptimConfig) -> float:
    return 1.0


def _half_wave(progress: float) -> float:
    """From 1 to 0 as `progress` goes from 0 to 1."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _falling(share: float, config: OptimConfig) -> float:
    """From 1 to `min_lr_ratio` as `share` goes from 1 to 0."""
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * share


_LEVELS: dict[str, Callable[[int, int, OptimConfig], float]] = {
    "cosine": _cosine,
    "restarts": _restarts,
    "wsd": _wsd,
    "constant": _constant,
    "plateau": _constant,
}


@dataclass
class Plateau:
    """What the plateau schedule remembers of the losses it was shown; kept in checkpoints."""

    best: float | None = None
    best_step: int = 0
    """Where that was, or where the rate was last reduced: from here on patience is counted."""
    reduction: float = 1.0
    """The rate is multiplied with this."""
    measure: str = ""
    """Name of the loss that was judged; best losses of another kind do not count."""

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        for name, value in (asdict(Plateau()) | dict(state)).items():
            setattr(self, name, value)

    def judge(self, step: int, measure: str, loss: float, config: OptimConfig) -> bool:
        """Look at the loss after `step` updates; true if the rate is reduced from here on."""
        if not math.isfinite(loss):
            return False
        if measure != self.measure:
            self.measure, self.best = measure, None
        if self.best is None or loss < self.best - config.plateau_threshold * abs(self.best):
            self.best, self.best_step = loss, step
            return False
        if step - max(self.best_step, config.warmup_steps) < config.plateau_patience:
            return False
        if config.lr * self.reduction <= config.plateau_min_lr:
            return False
        self.reduction *= config.plateau_factor
        self.best_step = step
        return True


def judged_loss(config: Config) -> str | None:
    """Name of the logged loss that the plateau schedule is judged on; None under the other schedules."""
    if config.optim.schedule != "plateau":
        return None
    return "valid_loss" if 0 < config.train.valid_every < config.train.steps else "loss"
