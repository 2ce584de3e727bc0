"""The forward process of both modalities as one object.

Corruption runs on the host, inside the loader's workers: the numbers are the same on every device, and the exact
count of scored tokens is known before anything is launched. Shapes: see `types`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.config import CorruptionConfig
from mmldlm.corruption.latent import LatentProcess
from mmldlm.corruption.schedule import LATENT_SCHEDULES, TEXT_SCHEDULES
from mmldlm.corruption.text import TextProcess
from mmldlm.corruption.times import draw_times
from mmldlm.types import Batch, Counts, NoisyBatch, Times, When


@dataclass(frozen=True)
class Corruption:
    """`corrupt` turns a clean micro-batch into a noisy one; a pure function of the documents' keys and positions."""

    config: CorruptionConfig
    seed: int
    vocab_size: int
    text_weighting: str = "bound"
    row_multiple: int = 1
    """Scored rows are filled up to a multiple of this, so that few shapes exist."""

    @property
    def text(self) -> TextProcess:
        """Rule of the noise on tokens; the mask's id comes after the vocabulary."""
        return TextProcess(TEXT_SCHEDULES[self.config.text_schedule], self.vocab_size)

    @property
    def latent(self) -> LatentProcess:
        """Latent noise and conversions."""
        return LatentProcess(LATENT_SCHEDULES[self.config.latent_schedule], self.config.prediction_type)

    def times(self, positions: np.ndarray, keys: np.ndarray, when: When | None = None) -> Times:
        """Times of the documents at these positions of the order, in a step of the run (none: its first)."""
        return draw_times(positions, keys, self.config, self.seed, when or When())

    def corrupt(self, batch: Batch) -> NoisyBatch:
        """Corrupt a micro-batch with the times of its documents' modes."""
        return self.corrupt_at(batch, self.times(batch.positions, batch.keys, batch.when))

    def corrupt_at(self, batch: Batch, times: Times) -> NoisyBatch:
        """Corrupt a micro-batch at given times."""
        layout = batch.layout
        text_time, latent_time = torch.from_numpy(times.text_time), torch.from_numpy(times.latent_time)
        token_time = text_time[layout.document]
        noisy_tokens, masked = self._noisy_tokens(batch, token_time)
        noise = randomness.normal(batch.keys, randomness.LATENT_NOISE, batch.latents[0].numel())
        latent_noise = torch.from_numpy(noise).view(batch.latents.shape)
        exists = layout.lengths > 0
        text_target = torch.from_numpy(times.text_is_target) & exists
        scored, weight = self._scored(masked & layout.real & text_target[layout.document], token_time)
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
            scored_weight=weight,
        )

    def count(self, lengths: np.ndarray, times: Times, num_slots: int) -> Counts:
        """What these documents contribute to the counts that the loss is divided by."""
        return Counts(
            tokens=float(lengths[times.text_is_target].sum()),
            slots=float(num_slots * times.latent_is_target[lengths > 0].sum()),
            documents=float(times.text_is_target[lengths > 0].sum()),
        )

    def _noisy_tokens(self, batch: Batch, token_time: Tensor) -> tuple[Tensor, Tensor]:
        keys, position = batch.keys[batch.layout.document.numpy()], batch.layout.position.numpy()
        chance = torch.from_numpy(randomness.uniform(keys, randomness.TEXT_MASK, position))
        return self.text.corrupt(batch.tokens, token_time, chance)

    def _scored(self, masked: Tensor, token_time: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.nonzero(masked).squeeze(1)
        weight = self._weight(token_time[rows])
        missing = -len(rows) % self.row_multiple if len(rows) else self.row_multiple
        return torch.nn.functional.pad(rows, (0, missing)), torch.nn.functional.pad(weight, (0, missing))

    def _weight(self, time: Tensor) -> Tensor:
        schedule = self.text.schedule
        if self.text_weighting == "bound":
            return schedule.bound_weight(time)
        # the same for every scored token, and on average one in all for every token
        return torch.full_like(time, 1.0 / schedule.mean_probability)
