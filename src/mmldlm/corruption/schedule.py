"""Schedules: how much signal is left at a time. Each is written once, for training and sampling.

Time runs from 0 (clean) to 1 (noise). At the two ends the values are exact, not nearly so.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

_HALF_PI = math.pi / 2


class TextSchedule(Protocol):
    """Share of masked tokens as a function of time."""

    def mask_probability(self, time: Tensor) -> Tensor:
        """p(t), rising from 0 to 1."""
        ...

    def time_of(self, mask_probability: Tensor) -> Tensor:
        """The inverse of `mask_probability`."""
        ...

    def bound_weight(self, time: Tensor) -> Tensor:
        """p'(t) / p(t), which makes the weighted loss a bound on the likelihood."""
        ...

    @property
    def mean_probability(self) -> float:
        """Mean of p over all times: the share of tokens that is masked in the long run."""
        ...


@dataclass(frozen=True)
class LinearText:
    """p(t) = t."""

    def mask_probability(self, time: Tensor) -> Tensor:
        return time

    def time_of(self, mask_probability: Tensor) -> Tensor:
        return mask_probability

    def bound_weight(self, time: Tensor) -> Tensor:
        return 1.0 / time

    @property
    def mean_probability(self) -> float:
        return 0.5


@dataclass(frozen=True)
class CosineText:
    """p(t) = 1 - cos(pi t / 2): more of the time is spent with little masked."""

    def mask_probability(self, time: Tensor) -> Tensor:
        # 1 - cos x = 2 sin^2(x/2) does not cancel near 0
        return torch.where(time >= 1.0, torch.ones_like(time), 2.0 * torch.sin(0.5 * _HALF_PI * time) ** 2)

    def time_of(self, mask_probability: Tensor) -> Tensor:
        return torch.arcsin(torch.sqrt(0.5 * mask_probability)) / (0.5 * _HALF_PI)

    def bound_weight(self, time: Tensor) -> Tensor:
        # p'/p = (pi/2) sin x / (1 - cos x) = (pi/2) / tan(x/2)
        return _HALF_PI / torch.tan(0.5 * _HALF_PI * time)

    @property
    def mean_probability(self) -> float:
        return 1.0 - 1.0 / _HALF_PI


class LatentSchedule(Protocol):
    """How clean latent and noise are mixed, and which mix of them is called the velocity.

    velocity = a * noise - b * clean, with factors such that a * signal + b * sigma = 1; so clean and noise follow
    from the noisy latent and the velocity without a division.
    """

    def signal(self, time: Tensor) -> Tensor:
        """Factor of the clean latent, 1 at time 0 and 0 at time 1."""
        ...

    def noise(self, time: Tensor) -> Tensor:
        """Factor of the noise (sigma), 0 at time 0 and 1 at time 1."""
        ...

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Factors of noise and clean latent in the velocity: a, b."""
        ...

    def slopes(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """Derivatives of signal and sigma by the time."""
        ...


@dataclass(frozen=True)
class CosineLatent:
    """signal(t) = cos(pi t / 2), signal^2 + sigma^2 = 1."""

    def signal(self, time: Tensor) -> Tensor:
        return torch.sin(_HALF_PI * (1.0 - time))  # exactly 0 at time 1, which cos is not

    def noise(self, time: Tensor) -> Tensor:
        return torch.sin(_HALF_PI * time)

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.signal(time), self.noise(time)

    def slopes(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return -_HALF_PI * self.noise(time), _HALF_PI * self.signal(time)


@dataclass(frozen=True)
class LinearLatent:
    """signal(t)^2 = 1 - t, sigma(t)^2 = t: the signal's power falls linearly."""

    def signal(self, time: Tensor) -> Tensor:
        return torch.sqrt(1.0 - time)

    def noise(self, time: Tensor) -> Tensor:
        return torch.sqrt(time)

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.signal(time), self.noise(time)

    def slopes(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return -0.5 / self.signal(time), 0.5 / self.noise(time)  # infinite at one end each


@dataclass(frozen=True)
class FlowLatent:
    """signal(t) = 1 - t, sigma(t) = t: a straight line from the latent to the noise, at the constant velocity
    noise - clean."""

    def signal(self, time: Tensor) -> Tensor:
        return 1.0 - time

    def noise(self, time: Tensor) -> Tensor:
        return time

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ones_like(time), torch.ones_like(time)

    def slopes(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return -torch.ones_like(time), torch.ones_like(time)


TEXT_SCHEDULES: dict[str, TextSchedule] = {"linear": LinearText(), "cosine": CosineText()}
LATENT_SCHEDULES: dict[str, LatentSchedule] = {
    "cosine": CosineLatent(),
    "linear": LinearLatent(),
    "flow": FlowLatent(),
}
