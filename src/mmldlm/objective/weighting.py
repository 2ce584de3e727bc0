"""How text and latent are balanced against each other, besides their fixed weights.

A balance is a table of factors, one for each modality and time bucket, in memory that never moves: recorded graphs
read it. Row weights are multiplied with them, so the loss of a step is still a sum over micro-batches and ranks of
local sums divided by counts known beforehand.
Shapes: M = 2 modalities (text, latent), B time buckets, N documents, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmldlm.config import ObjectiveConfig
from mmldlm.objective.buckets import NUM_BUCKETS, bucket_of
from mmldlm.types import Counts, NoisyBatch

LR_SCALE = 10.0
"""Log-variances learn so many times as fast as weights: they have a long way to go, and few neighbours to disturb."""
_SMOOTHING = 0.1
"""Share of a new measurement of gradient norms; the first ones are averaged."""
_LARGEST_LOG_RATIO = math.log(1000.0)


class LossBalance(nn.Module):
    """Factors of text and latent; one if nothing else is known."""

    weights: Tensor

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__()
        weights = torch.tensor([config.text_weight, config.latent_weight])
        self.register_buffer("weights", weights, persistent=False)

    def factors(self) -> Tensor:
        """(M, B), each above 0."""
        raise NotImplementedError

    def weigh(self, batch: NoisyBatch) -> NoisyBatch:
        """The batch with its weights multiplied; no gradient of the factors comes this way."""
        text, latent = self.factors().detach()
        token_time = batch.text_time[batch.layout.document]
        return replace(
            batch,
            scored_weight=batch.scored_weight * text[bucket_of(token_time[batch.scored])],
            latent_target=batch.latent_target * latent[bucket_of(batch.latent_time)],
        )

    def extra(self, losses: Tensor, batch: NoisyBatch, counts: Counts) -> Tensor:
        """What is added to the loss of a micro-batch, whose parts without factors are `losses` (M, B)."""
        return losses.new_zeros(())

    def still(self, *, text: bool, latent: bool) -> dict[nn.Parameter, slice]:
        """Parameter -> rows of it that no loss depends on, where only these losses exist."""
        return {}

    @torch.no_grad()
    def fields(self) -> dict[str, Any]:
        """For the log: the mean of the factors over the buckets. Waits for the device."""
        text, latent = self.factors().mean(1).tolist()
        return {"text_factor": text, "latent_factor": latent}


class Uncertainty(LossBalance):
    """A loss of variance exp(s): exp(-s) L + s, for every document by its own times, as a Gaussian likelihood has it.

    With p_b the share of scored tokens (or slots) in bucket b and L_b their mean loss, the loss of a modality is
    sum_b p_b (exp(-s_b) L_b + s_b), whose best s_b is log L_b.
    """

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self.log_variances = nn.Parameter(torch.zeros(2, NUM_BUCKETS))

    def factors(self) -> Tensor:
        """(M, B)"""
        return torch.exp(-self.log_variances)

    def extra(self, losses: Tensor, batch: NoisyBatch, counts: Counts) -> Tensor:
        """The terms s, and zero with the gradient that the factors have in the weighted losses."""
        factors = self.factors()
        through = (factors - factors.detach()) * losses
        return (self.weights[:, None] * (through + _shares(batch, counts) * self.log_variances)).sum()

    def still(self, *, text: bool, latent: bool) -> dict[nn.Parameter, slice]:
        """The row of a modality without a loss."""
        rows = slice(int(text), 2 - int(latent))
        return {self.log_variances: rows} if rows.start < rows.stop else {}

    @torch.no_grad()
    def fields(self) -> dict[str, Any]:
        """The factors of the buckets too."""
        text, latent = self.factors().tolist()
        return super().fields() | {"text_factor_by_time": text, "latent_factor_by_time": latent}


class GradientNorm(LossBalance):
    """Factors under which the gradients of text and latent have norms in the ratio of their weights.

    With norms g and g' of text and latent and weights w and w', the factors m / g and m / g' do this, and with the mean
    norm m = (w g + w' g') / (w + w') the norms add up to what they add up to without factors. Both are functions of
    g / g' alone.
    """

    log_ratio: Tensor
    measured: Tensor

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__(config)
        self.every = config.balance_every
        self.last = 0
        """The step at which the norms were measured last; a checkpoint keeps it."""
        self.register_buffer("log_ratio", torch.zeros(()))  # of text to latent, smoothed
        self.register_buffer("measured", torch.zeros(()))

    def factors(self) -> Tensor:
        """(M, B), the same for all buckets."""
        ratio = self.log_ratio.exp()
        text, latent = self.weights / self.weights.sum()
        pair = torch.stack([text + latent / ratio, text * ratio + latent])
        return pair[:, None].expand(2, NUM_BUCKETS)

    def due(self, step: int) -> bool:
        """Whether the norms are to be measured from a step on, counted from 0: at the first one with both losses after
        `every` more steps. At first some heads pass no gradient on, so not at the very first."""
        return step // self.every > self.last // self.every

    @torch.no_grad()
    def settle(self, norms: Tensor, step: int) -> None:
        """Take in a measurement (M,) of a step, on the device; one that is not finite, or 0, changes nothing."""
        self.last = step
        found = norms[0].log() - norms[1].log()
        good = torch.isfinite(found).float()
        bounded = torch.nan_to_num(found).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        share = torch.clamp(1.0 / (self.measured + 1.0), min=_SMOOTHING) * good
        self.log_ratio.lerp_(bounded, share)
        self.measured.add_(good)


def _shares(batch: NoisyBatch, counts: Counts) -> Tensor:
    """(M, B): what the documents of a micro-batch contribute to the counts of the step, by bucket, as shares."""
    tokens = (batch.length_target * batch.layout.lengths, batch.text_time, counts.tokens)
    slots = (batch.latent_target * batch.layout.num_slots, batch.latent_time, counts.slots)
    return torch.stack(
        [
            sum_by_bucket(rows, time) / torch.as_tensor(count).clamp(min=1.0)
            for rows, time, count in (tokens, slots)
        ]
    )


@torch.no_grad()
def sum_by_bucket(rows: Tensor, time: Tensor) -> Tensor:
    """(B,): sum of the rows of each bucket; the same bits every time. (R,), (R,)"""
    inside = bucket_of(time) == torch.arange(NUM_BUCKETS, device=time.device)[:, None]
    return torch.where(inside, rows.float(), 0.0).sum(1)


def norms_of_shared(text: Sequence[Tensor | None], latent: Sequence[Tensor | None]) -> Tensor:
    """(M,): norms of two lists of gradients, or of their norms, over the parameters that both losses reach."""
    both = [(a, b) for a, b in zip(text, latent, strict=True) if a is not None and b is not None]
    return torch.stack([torch.nn.utils.get_total_norm(list(part)) for part in zip(*both, strict=True)])


def build_balance(config: ObjectiveConfig) -> LossBalance | None:
    """As the settings say; none where the weights stay as they are."""
    kinds = {"uncertainty": Uncertainty, "gradient_norm": GradientNorm}
    return kinds[config.balance](config) if config.balance in kinds else None
