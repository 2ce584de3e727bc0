"""The forward process: schedules, masks on tokens, Gaussian noise on latents, and both as one object.

A schedule says how much signal is left at a time, from 0 (clean) to 1 (noise). It is written once, for training and
sampling, and exact at both ends. With p the schedule's mask probability, a token is masked with probability p and
clean with probability 1 - p.

Corruption runs on the host, inside the loader's workers: the numbers are the same on every device, and the exact
count of scored tokens is known before anything is launched. Shapes: see `types`.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm import randomness
from mmldlm.config import CorruptionConfig
from mmldlm.corruption.times import draw_times
from mmldlm.types import Counts, NoisyBatch, PackedBatch, Times, When

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


@dataclass(frozen=True)
class CosineLatent:
    """signal(t) = cos(pi t / 2), signal^2 + sigma^2 = 1."""

    def signal(self, time: Tensor) -> Tensor:
        return torch.sin(_HALF_PI * (1.0 - time))  # exactly 0 at time 1, which cos is not

    def noise(self, time: Tensor) -> Tensor:
        return torch.sin(_HALF_PI * time)

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.signal(time), self.noise(time)


@dataclass(frozen=True)
class LinearLatent:
    """signal(t)^2 = 1 - t, sigma(t)^2 = t: the signal's power falls linearly."""

    def signal(self, time: Tensor) -> Tensor:
        return torch.sqrt(1.0 - time)

    def noise(self, time: Tensor) -> Tensor:
        return torch.sqrt(time)

    def velocity_factors(self, time: Tensor) -> tuple[Tensor, Tensor]:
        return self.signal(time), self.noise(time)


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


TEXT_SCHEDULES: dict[str, TextSchedule] = {"linear": LinearText(), "cosine": CosineText()}
LATENT_SCHEDULES: dict[str, LatentSchedule] = {
    "cosine": CosineLatent(),
    "linear": LinearLatent(),
    "flow": FlowLatent(),
}


@dataclass(frozen=True)
class TextProcess:
    """The masking rule, shared by training and sampling."""

    schedule: TextSchedule
    mask_id: int
    """The id after the vocabulary, so also its size: an input of the denoiser, never one of its outputs."""

    def corrupt(self, tokens: Tensor, time: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Noisy tokens and where they are masked; time and a uniform number in (0, 1) per token.

        At time 0 nothing is masked and at time 1 everything, exactly.
        """
        masked = uniform < self.schedule.mask_probability(time)
        return tokens.masked_fill(masked, self.mask_id), masked

    def unmask_probability(self, time: Tensor, next_time: Tensor) -> Tensor:
        """Probability that a token masked at `time` is clean at the earlier `next_time`: 1 - p(s) / p(t)."""
        return 1.0 - self.schedule.mask_probability(next_time) / self.schedule.mask_probability(time)


LATEST_NOISE_TIME = 0.999
"""A noise prediction does not determine the clean latent at time 1, so its samplers start just before."""


@dataclass(frozen=True)
class LatentProcess:
    """Gaussian diffusion on latents, and the conversions between what a network may predict.

        noisy    = signal * clean + sigma * noise
        velocity = a * noise - b * clean,   a * signal + b * sigma = 1
        clean    = a * noisy - sigma * velocity
        noise    = b * noisy + signal * velocity

    Variance-preserving schedules have a = signal and b = sigma, the flow schedule a = b = 1.
    """

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


@dataclass(frozen=True)
class Corruption:
    """`corrupt` turns a clean micro-batch into a noisy one; a pure function of the documents' keys and positions.

    >>> import numpy as np
    >>> from mmldlm import Corruption, PackedBatch
    >>> corruption = Corruption(vocab_size=97)
    >>> noisy = corruption.corrupt(PackedBatch.of([[3, 1, 4]] * 100, np.zeros((100, 7), np.float32)))
    >>> masked = noisy.noisy_tokens == corruption.text.mask_id
    >>> bool((noisy.noisy_tokens[~masked] == noisy.tokens[~masked]).all())
    True
    """

    config: CorruptionConfig = field(default_factory=CorruptionConfig)
    _: KW_ONLY
    vocab_size: int
    seed: int = 0
    row_multiple: int = 1
    """Scored rows are filled up to a multiple of this, so that few shapes exist."""
    derived_share: float = 0.0
    """Of the documents of the split, those that `prepare --derive` made of others."""

    @property
    def text(self) -> TextProcess:
        """Rule of the noise on tokens; the mask's id comes after the vocabulary."""
        return TextProcess(TEXT_SCHEDULES[self.config.text_schedule], self.vocab_size)

    @property
    def latent(self) -> LatentProcess:
        """Latent noise and conversions."""
        return LatentProcess(LATENT_SCHEDULES[self.config.latent_schedule], self.config.prediction_type)

    def times(
        self,
        positions: np.ndarray,
        keys: np.ndarray,
        when: When | None = None,
        derived: np.ndarray | None = None,
    ) -> Times:
        """Times of the documents at these positions of the order, in a step of the run (none: its first)."""
        return draw_times(
            positions, keys, self.config, self.seed, when or When(), derived, self.derived_share
        )

    def corrupt(self, batch: PackedBatch) -> NoisyBatch:
        """Corrupt a micro-batch with the times of its documents' modes."""
        return self.corrupt_at(batch, self.times(batch.positions, batch.keys, batch.when, batch.derived))

    def corrupt_at(self, batch: PackedBatch, times: Times) -> NoisyBatch:
        """Corrupt a micro-batch at given times."""
        layout = batch.layout
        text_time, latent_time = torch.from_numpy(times.text_time), torch.from_numpy(times.latent_time)
        token_time = text_time[layout.document]
        noisy_tokens, masked = self._noisy_tokens(batch, token_time)
        noise = randomness.normal(batch.keys, randomness.LATENT_NOISE, batch.latents[0].numel())
        latent_noise = torch.from_numpy(noise).view(batch.latents.shape)
        exists = layout.lengths > 0
        text_target = torch.from_numpy(times.text_is_target) & exists
        scored, real = self._scored(masked & layout.real & text_target[layout.document])
        return NoisyBatch(
            layout=layout,
            tokens=batch.tokens,
            latents=batch.latents,
            noisy_tokens=noisy_tokens,
            noisy_latents=self.latent.corrupt(batch.latents, latent_noise, latent_time),
            latent_noise=latent_noise,
            text_time=text_time,
            latent_time=latent_time,
            latent_target=(torch.from_numpy(times.latent_is_target) & exists).float(),
            length_target=text_target.float(),
            scored=scored,
            scored_real=real,
        )

    def count(self, lengths: np.ndarray, times: Times, num_slots: int) -> Counts:
        """What these documents contribute to the counts that the loss is divided by."""
        return Counts(
            tokens=float(lengths[times.text_is_target].sum()),
            slots=float(num_slots * times.latent_is_target[lengths > 0].sum()),
            documents=float(times.text_is_target[lengths > 0].sum()),
        )

    def _noisy_tokens(self, batch: PackedBatch, token_time: Tensor) -> tuple[Tensor, Tensor]:
        keys, position = batch.keys[batch.layout.document.numpy()], batch.layout.position.numpy()
        chance = torch.from_numpy(randomness.uniform(keys, randomness.TEXT_MASK, position))
        return self.text.corrupt(batch.tokens, token_time, chance)

    def _scored(self, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that are scored, filled up with repeats of the last row, and which of them are no repeats."""
        rows = torch.nonzero(masked).squeeze(1)
        missing = -len(rows) % self.row_multiple if len(rows) else self.row_multiple
        real = torch.ones(len(rows), dtype=torch.bool)
        return F.pad(rows, (0, missing), value=len(masked) - 1), F.pad(real, (0, missing))
