"""Masked diffusion on tokens: with time, tokens turn into masks.

With p the schedule's mask probability, a token is masked with probability p and clean with probability 1 - p.
Shapes: T tokens, or any rows of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmldlm.corruption.schedule import TextSchedule


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
