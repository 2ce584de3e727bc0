"""The forward process of both modalities as one object.

Corruption runs on the host, inside the loader's workers: the numbers are the same on every device, and the exact
count of scored tokens is known before anything is launched. Shapes: see `types`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm import randomness
from mmldlm.config import CorruptionConfig
from mmldlm.corruption.latent import LatentProcess
from mmldlm.corruption.schedule import LATENT_SCHEDULES, TEXT_SCHEDULES
from mmldlm.corruption.text import TextProcess
from mmldlm.corruption.times import draw_times
from mmldlm.types import Counts, NoisyBatch, PackedBatch, Times, When


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

    def corrupt(self, batch: PackedBatch) -> NoisyBatch:
        """Corrupt a micro-batch with the times of its documents' modes."""
        return self.corrupt_at(batch, self.times(batch.positions, batch.keys, batch.when))

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
        """Rows that are scored, filled up with repeats of row 0, and which of them are no repeats."""
        rows = torch.nonzero(masked).squeeze(1)
        missing = -len(rows) % self.row_multiple if len(rows) else self.row_multiple
        real = torch.ones(len(rows), dtype=torch.bool)
        return F.pad(rows, (0, missing)), F.pad(real, (0, missing))
