"""Gaussian diffusion on latents, and the conversions between what a network may predict.

noisy    = signal * clean + sigma * noise
velocity = a * noise - b * clean,   a * signal + b * sigma = 1
clean    = a * noisy - sigma * velocity
noise    = b * noisy + signal * velocity

Variance-preserving schedules have a = signal and b = sigma, the flow schedule a = b = 1 (see `schedule`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.corruption.schedule import LatentSchedule

LATEST_NOISE_TIME = 0.999
"""A noise prediction does not determine the clean latent at time 1, so its samplers start just before."""


@dataclass(frozen=True)
class LatentProcess:
    """Forward process and conversions. Times are (N,), latents (N, S, C)."""

    schedule: LatentSchedule
    prediction_type: str

    @property
    def latest_time(self) -> float:
        """Where sampling starts: the last time at which the prediction determines the clean latent."""
        return LATEST_NOISE_TIME if self.prediction_type == "noise" else 1.0

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """signal and sigma, shaped to multiply latents."""
        return self.schedule.signal(time)[:, None, None], self.schedule.noise(time)[:, None, None]

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """a and b, the factors of noise and clean latent in the velocity, shaped to multiply latents."""
        of_noise, of_clean = self.schedule.velocity_factors(time)
        return of_noise[:, None, None], of_clean[:, None, None]

    def corrupt(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The noisy latent; exactly the clean one at time 0 and exactly the noise at time 1."""
        signal, sigma = self.levels(time)
        return signal * clean + sigma * noise

    def prediction(self, output: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """What the network's output means. Noise is predicted as a correction of the noisy latent,

            noise = b * noisy + signal * output,

        so that an error of the output is not magnified where little signal is left.
        """
        if self.prediction_type != "noise":
            return output
        signal, _ = self.levels(time)
        _, of_clean = self.velocity_factors(time)
        return of_clean * noisy + signal * output

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the network should predict."""
        if self.prediction_type == "clean":
            return clean
        if self.prediction_type == "noise":
            return noise
        of_noise, of_clean = self.velocity_factors(time)
        return of_noise * noise - of_clean * clean

    def to_clean(self, prediction: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The clean latent that a prediction stands for."""
        signal, sigma = self.levels(time)
        if self.prediction_type == "clean":
            return prediction
        if self.prediction_type == "noise":
            return (noisy - sigma * prediction) / signal
        of_noise, _ = self.velocity_factors(time)
        return of_noise * noisy - sigma * prediction

    def to_noise(self, prediction: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The noise that a prediction stands for; where a clean one is predicted at time 0 there is none, so zero."""
        signal, sigma = self.levels(time)
        if self.prediction_type == "noise":
            return prediction
        if self.prediction_type == "clean":
            noise = (noisy - signal * prediction) / sigma
            return torch.where(sigma > 0, noise, torch.zeros_like(noise))
        _, of_clean = self.velocity_factors(time)
        return of_clean * noisy + signal * prediction

    def ode_velocity(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """d noisy / d time along the probability-flow path, for the clean latent and noise expected at this time."""
        signal_slope, sigma_slope = self.schedule.slopes(time)
        return signal_slope[:, None, None] * clean + sigma_slope[:, None, None] * noise
