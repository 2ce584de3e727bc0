"""Gaussian diffusion on latents, and the conversions between what a network may predict.

noisy = signal * clean + sigma * noise,   signal^2 + sigma^2 = 1
velocity = signal * noise - sigma * clean
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.corruption.schedule import LatentSchedule

LATEST_NOISE_TIME = 0.999
"""A noise prediction says nothing about the clean latent at time 1, so its samplers start just before."""


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

    def corrupt(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The noisy latent; exactly the clean one at time 0 and exactly the noise at time 1."""
        signal, sigma = self.levels(time)
        return signal * clean + sigma * noise

    def prediction(self, output: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """What the network's output means. Noise is predicted as a correction of the noisy latent,

            noise = sigma * noisy + signal * output,

        so that an error of the output is not magnified where little signal is left.
        """
        if self.prediction_type != "noise":
            return output
        signal, sigma = self.levels(time)
        return sigma * noisy + signal * output

    def target(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the network should predict."""
        if self.prediction_type == "clean":
            return clean
        if self.prediction_type == "noise":
            return noise
        signal, sigma = self.levels(time)
        return signal * noise - sigma * clean

    def to_clean(self, prediction: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The clean latent that a prediction stands for."""
        signal, sigma = self.levels(time)
        if self.prediction_type == "clean":
            return prediction
        if self.prediction_type == "noise":
            return (noisy - sigma * prediction) / signal
        return signal * noisy - sigma * prediction

    def to_noise(self, prediction: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The noise that a prediction stands for; at time 0 there is none, so zero."""
        signal, sigma = self.levels(time)
        if self.prediction_type == "noise":
            return prediction
        if self.prediction_type == "clean":
            noise = (noisy - signal * prediction) / sigma
            return torch.where(sigma > 0, noise, torch.zeros_like(noise))
        return sigma * noisy + signal * prediction
