"""Discrete diffusion on tokens: with time, tokens turn into masks, and with hybrid noise some into random tokens.

With p the schedule's share of noise, s the `uniform_share` and V the size of the vocabulary, a token is at a time

    clean   with probability  1 - p
    random  with probability  s p (1 - p),   any of the V tokens alike
    masked  with probability  p - s p (1 - p)

So among the noise a share s (1 - p) is random: s at first, nothing at time 1, where all is masked. s = 0 is masked
diffusion. This is a generalised interpolating diffusion (GIDD): q_t(z|x) = (1 - p) x + p pi_t with a mix pi_t of mask
and uniform tokens. `stray` = s p / V is the chance of a random token that happens to be a given one, over that of a
clean token; it is all that the bound, the posterior and the sampler need to know of the random tokens.
Shapes: T tokens, or any rows of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mmldlm.corruption.schedule import TextSchedule

SMALLEST_STRAY = 1e-18
"""Keeps logarithms, ratios and the squares of ratios finite in rows at time 0, which weigh nothing. Real values are
larger, but for times so small that what they weigh is nothing either."""


class BoundParts(NamedTuple):
    """What a row costs in the bound, per unit of `TextSchedule.bound_weight`; see `TextProcess.bound_parts`."""

    divergence: Tensor
    """(T,) factor of the Kullback-Leibler divergence."""
    surprise: Tensor
    """(T,) factor of the Itakura-Saito divergence."""


@dataclass(frozen=True)
class TextProcess:
    """The rule of noise, shared by training and sampling."""

    schedule: TextSchedule
    mask_id: int
    """The id after the vocabulary, so also its size: an input of the denoiser, never one of its outputs."""
    uniform_share: float = 0.0
    """Share of random tokens among the noise where it is largest, at small times; 0: masks only."""

    @property
    def hybrid(self) -> bool:
        """Is some of the noise random tokens?"""
        return self.uniform_share > 0

    def levels(self, time: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Shares of clean, random and masked tokens; exactly (1, 0, 0) at time 0 and (0, 0, 1) at time 1."""
        noise = self.schedule.mask_probability(time)
        random = self.uniform_share * noise * (1.0 - noise)
        return 1.0 - noise, random, noise - random

    def corrupt(
        self, tokens: Tensor, time: Tensor, uniform: Tensor, replacement: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Noisy tokens and where they are masked; time and a uniform number in (0, 1) per token.

        `replacement` are random tokens, which hybrid noise needs. At time 0 nothing is changed and at time 1
        everything is masked, exactly.
        """
        _, random, masked_share = self.levels(time)
        masked = uniform < masked_share
        if self.hybrid:
            assert replacement is not None, "hybrid noise needs random tokens"
            tokens = torch.where(uniform < masked_share + random, replacement, tokens)
        return tokens.masked_fill(masked, self.mask_id), masked

    def unmask_probability(self, time: Tensor, next_time: Tensor) -> Tensor:
        """Probability that a token masked at `time` is clean at the earlier `next_time`: 1 - p(s) / p(t)."""
        return 1.0 - self.schedule.mask_probability(next_time) / self.schedule.mask_probability(time)

    def stray(self, time: Tensor) -> Tensor:
        """(T,) random / (V clean) = s p / V."""
        noise = self.schedule.mask_probability(time)
        return (self.uniform_share * noise / self.mask_id).clamp(min=SMALLEST_STRAY)

    def bound_parts(self, tokens: Tensor, noisy_tokens: Tensor, time: Tensor) -> BoundParts:
        """Factors of the two divergences of the bound (see `objective/hybrid.py`), both finite at every time.

        The rate at which the forward process enters the noisy token z, over q(z|x), is

            p'/p * (1 / (1 - p) + s p / (1 - s + s p))   where z is the mask
            p'/p                                         where z is a wrong token
            p'/p * stray / (1 + stray)                   where z is the clean token x

        The Kullback-Leibler divergence is counted in units of 1 - p, which the rate of the mask has below it.
        """
        noise, stray, share = self.schedule.mask_probability(time), self.stray(time), self.uniform_share
        kept = torch.where(noisy_tokens == tokens, stray / (1.0 + stray), torch.ones_like(stray))
        masked = noisy_tokens == self.mask_id
        clean = 1.0 - noise
        of_mask = 1.0 + share * noise * clean / (1.0 - share * clean)
        return BoundParts(
            divergence=torch.where(masked, of_mask, clean * kept),
            surprise=kept.masked_fill(masked, 0.0),
        )

    def posterior_gain(self, noisy_tokens: Tensor, time: Tensor) -> Tensor:
        """(T,) what the noisy token adds to its own logit: log q(z|x=z) - log q(z|x other) = log(1 + 1 / stray).

        A mask says nothing about the token under it, so 0.
        """
        gain = torch.log1p(1.0 / self.stray(time))
        return gain.masked_fill(noisy_tokens == self.mask_id, 0.0)

    def renewal_probability(
        self, noisy_tokens: Tensor, probability: Tensor, time: Tensor, next_time: Tensor
    ) -> Tensor:
        """Chance that the reverse step from `time` to the earlier `next_time` draws a token anew.

        The reverse posterior q(y at next_time | z at time, x) is

            stay * [y = z] + renewal * q_next(y|x),   renewal = 1 - stay

        where q_next(y|x) has the `levels` of `next_time`, and for a predicted distribution x of clean tokens, with
        `probability` its value at z,

            renewal = (stray - next stray) / (x(z) + stray)     where z is a token
            renewal = 1 - clean * next masked / (next clean * masked)     where z is the mask
        """
        clean, _, masked = self.levels(time)
        next_clean, _, next_masked = self.levels(next_time)
        stray, next_stray = self.stray(time), self.stray(next_time)
        of_mask = 1.0 - clean * next_masked / (next_clean * masked)
        of_token = (stray - next_stray) / (probability + stray)
        return torch.where(noisy_tokens == self.mask_id, of_mask, of_token)
