"""From a noisy micro-batch to the named parts of the loss.

Every part is a local sum divided by a count over the whole step, so the sum over micro-batches and ranks is the loss
of the step, however it was cut up. Text and latent may be balanced against each other by a pair of factors, in memory
that never moves: recorded graphs read it. Row weights are multiplied with them, so a step is still such a sum.
Shapes: M = 2 modalities (text, latent), R rows, B buckets of time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmldlm.config import MODES, CorruptionConfig, ObjectiveConfig
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import modes_of_run
from mmldlm.model.denoiser import Denoiser
from mmldlm.objective.losses import (
    NUM_BUCKETS,
    TextLoss,
    latent_loss,
    slot_errors,
    sum_by_bucket,
    sums_by_time,
    text_loss,
    text_loss_of_all,
    text_weights,
)
from mmldlm.types import Counts, DenoiserOutput, NoisyBatch

_SMOOTHING = 0.1
"""Share of a new measurement of gradient norms; the first ones are averaged."""
_LARGEST_LOG_RATIO = math.log(1000.0)


class GradientNorm(nn.Module):
    """Factors under which the gradients of text and latent have norms in the ratio of their weights.

    With norms g and g' of text and latent and weights w and w', the factors m / g and m / g' do this, and with the mean
    norm m = (w g + w' g') / (w + w') the norms add up to what they add up to without factors. Both are functions of
    g / g' alone.
    """

    weights: Tensor
    log_ratio: Tensor
    measured: Tensor

    def __init__(self, config: ObjectiveConfig) -> None:
        super().__init__()
        weights = torch.tensor([config.text_weight, config.latent_weight])
        self.register_buffer("weights", weights, persistent=False)
        self.every = config.balance_every
        self.last = 0
        """The step at which the norms were measured last; a checkpoint keeps it."""
        self.register_buffer("log_ratio", torch.zeros(()))  # of text to latent, smoothed
        self.register_buffer("measured", torch.zeros(()))

    def factors(self) -> Tensor:
        """(M,), each above 0; one if nothing was measured yet."""
        ratio = self.log_ratio.exp()
        text, latent = self.weights / self.weights.sum()
        return torch.stack([text + latent / ratio, text * ratio + latent])

    def due(self, step: int) -> bool:
        """Whether the norms are to be measured from a step on, counted from 0: at the first one with both losses after
        `every` more steps. At first some heads pass no gradient on, so not at the very first."""
        return step // self.every > self.last // self.every

    @torch.no_grad()
    def settle(self, norms: Tensor, step: int) -> None:
        """Take in a measurement (M,) of a step, on the device; one that is not finite, or 0, changes nothing."""
        self.last = step
        log_ratio = norms[0].log() - norms[1].log()
        good = torch.isfinite(log_ratio).float()
        bounded = torch.nan_to_num(log_ratio).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        share = torch.clamp(1.0 / (self.measured + 1.0), min=_SMOOTHING) * good
        self.log_ratio.lerp_(bounded, share)
        self.measured.add_(good)

    @torch.no_grad()
    def fields(self) -> dict[str, Any]:
        """The factors for the log. Waits for the device."""
        text, latent = self.factors().tolist()
        return {"text_factor": text, "latent_factor": latent}


def norms_of_shared(text: Sequence[Tensor | None], latent: Sequence[Tensor | None]) -> Tensor:
    """(M,): norms of two lists of gradients, or of their norms, over the parameters that both losses reach."""
    both = [(a, b) for a, b in zip(text, latent, strict=True) if a is not None and b is not None]
    return torch.stack([torch.nn.utils.get_total_norm(list(part)) for part in zip(*both, strict=True)])


def build_balance(config: ObjectiveConfig, *, text: bool, latent: bool) -> GradientNorm | None:
    """The balance of a run that has these losses; None where the weights stay as they are."""
    return GradientNorm(config) if config.balance == "gradient_norm" and text and latent else None


@dataclass
class LossTerms:
    """Parts of the loss, already divided by their counts; `loss` is their sum with fixed weights."""

    loss: Tensor
    text: Tensor
    latent: Tensor
    length: Tensor
    correct: Tensor
    """Number of scored tokens that were predicted right."""
    scored: Tensor
    """Number of scored tokens."""
    text_by_time: Tensor
    """(2, buckets): sum of nats of the scored tokens of each text time, without weights, and their number."""
    latent_by_time: Tensor
    """(2, buckets): sum of errors of the scored slots of each latent time, without weights, and their number."""
    trained: Tensor
    """What is differentiated: `loss`, or with a balance what that makes of it."""

    def detached(self) -> LossTerms:
        """The same values without a graph."""
        return LossTerms(**{item.name: getattr(self, item.name).detach() for item in fields(self)})

    def copy(self) -> LossTerms:
        """Values of their own, in other memory."""
        return LossTerms(**{item.name: getattr(self, item.name).detach().clone() for item in fields(self)})


@dataclass(frozen=True)
class Active:
    """Which parts of the loss there are at all. A part without a loss is not computed and gets no update."""

    text: bool
    latent: bool
    length: bool

    @classmethod
    def of(cls, corruption: CorruptionConfig, objective: ObjectiveConfig, *, length_modelled: bool) -> Active:
        """From the modes and weights of a whole run: those that it has somewhere."""
        weights = modes_of_run(corruption)
        modes = frozenset(mode for mode in MODES if getattr(weights, mode) > 0)
        return cls.of_modes(modes, objective, length_modelled=length_modelled)

    @classmethod
    def of_modes(cls, modes: frozenset[str], objective: ObjectiveConfig, *, length_modelled: bool) -> Active:
        """While documents are in these modes."""
        has_text, has_latent = bool(modes & {"l2t", "joint"}), bool(modes & {"t2l", "joint"})
        return cls(
            text=has_text and objective.text_weight > 0,
            latent=has_latent and objective.latent_weight > 0,
            length=length_modelled and has_text and objective.length_weight > 0,
        )


class Objective:
    """Prediction -> loss terms. A run has one: training and validation call it alike.

    >>> import numpy as np
    >>> from mmldlm import Corruption, Denoiser, Objective, PackedBatch
    >>> from mmldlm.config import ModelConfig, ObjectiveConfig
    >>> from mmldlm.model.denoiser import DataShape
    >>> denoiser = Denoiser(ModelConfig(preset="tiny"), DataShape(97, num_slots=1, num_channels=5, max_length=8))
    >>> corruption = Corruption(vocab_size=97)
    >>> batch = PackedBatch.of([[3, 1, 4], [1, 5, 9, 2]], np.ones((2, 5), np.float32))
    >>> terms = Objective(ObjectiveConfig(), corruption)(denoiser, corruption.corrupt(batch))
    >>> terms.loss.backward()
    >>> bool(terms.loss > 0)
    True
    """

    def __init__(
        self,
        config: ObjectiveConfig,
        corruption: Corruption,
        *,
        length_modelled: bool = True,
        scored_rows: bool = True,
        chunk_rows: int = 2048,
        fused: bool = False,
    ) -> None:
        """`length_modelled`: the denoiser has a length head. The others are settings of `speed`: the end of the last
        block and the output head see scored rows only, the head so many at a time, in a Triton kernel."""
        self.config, self.corruption = config, corruption
        self.active = Active.of(corruption.config, config, length_modelled=length_modelled)
        """The losses of the whole run."""
        self.scored_rows, self.chunk_rows, self.fused = scored_rows, chunk_rows, fused

    def __call__(
        self,
        denoiser: Denoiser,
        batch: NoisyBatch,
        counts: Counts | None = None,
        *,
        active: Active | None = None,
        balance: GradientNorm | None = None,
    ) -> LossTerms:
        """Run the denoiser on a noisy micro-batch and score what was corrupted.

        `counts` are those of the whole step (None: the micro-batch is the step), `active` the losses that exist in it
        (None: those of the run), `balance` the factors that `trained` has and the reported terms have not.
        """
        counts, active = counts or Counts.of(batch), active or self.active
        factors = balance.factors() if balance is not None else None
        output: DenoiserOutput = denoiser(
            batch.noisy_tokens, batch.noisy_latents, batch.text_time, batch.latent_time, batch.layout,
            batch.scored if self.scored_rows else None,
        )  # fmt: skip
        zero = batch.text_time.new_zeros(())
        length, nothing = zero, zero.new_zeros(NUM_BUCKETS)
        text = latent = _Part(zero, nothing, zero.new_zeros(2, NUM_BUCKETS))
        correct, scored = zero, zero
        if active.text:
            rows = self._rows(batch, None if factors is None else factors[0])
            result = self._text(denoiser, output, batch, rows)
            text = _text_part(result, rows, _at_least_one(counts.tokens))
            correct, scored = result.correct, result.rows
        if active.latent:
            weight = batch.latent_target if factors is None else batch.latent_target * factors[1]
            latent = self._latent(output, batch, weight, _at_least_one(counts.slots))
        if active.length:
            length = length_loss(output.length_logits, batch) / _at_least_one(counts.documents)
        trained = self._sum(text.loss, latent.loss, length)
        terms = LossTerms(
            trained, text.loss, latent.loss, length, correct, scored, text.by_time, latent.by_time, trained
        )
        if factors is None:
            return terms
        plain = (torch.stack([text.by_bucket, latent.by_bucket]) / factors[:, None]).sum(1)
        loss = self._sum(plain[0], plain[1], length.detach())
        return replace(terms, loss=loss, text=plain[0], latent=plain[1])

    def _sum(self, text: Tensor, latent: Tensor, length: Tensor) -> Tensor:
        weights = self.config
        return weights.text_weight * text + weights.latent_weight * latent + weights.length_weight * length

    def _rows(self, batch: NoisyBatch, factor: Tensor | None) -> TextRows:
        """The tokens that the head predicts, with their weights."""
        token_time = batch.text_time[batch.layout.document]
        time = token_time[batch.scored]
        schedule = self.corruption.text.schedule
        weight = text_weights(self.config.text_weighting, schedule, time, batch.scored_real)
        if factor is not None:
            weight = weight * factor
        if self.scored_rows:
            return TextRows(batch.tokens.index_select(0, batch.scored), weight, time)
        of_all = torch.zeros_like(token_time).index_add(0, batch.scored, weight)
        return TextRows(batch.tokens, of_all, token_time)

    def _text(
        self, denoiser: Denoiser, output: DenoiserOutput, batch: NoisyBatch, rows: TextRows
    ) -> TextLoss:
        if not self.scored_rows:
            return text_loss_of_all(denoiser.token_logits(output.token_hidden), rows.tokens, rows.weight)
        return text_loss(
            denoiser.token_head, output.token_hidden, rows.tokens, rows.weight,
            vocab_size=denoiser.shape.vocab_size, chunk_rows=self.chunk_rows, fused=self.fused,
        )  # fmt: skip

    def _latent(
        self, output: DenoiserOutput, batch: NoisyBatch, weight: Tensor, count: float | Tensor
    ) -> _Part:
        process = self.corruption.latent
        target = process.target(batch.latents, batch.latent_noise, batch.latent_time)
        prediction = process.prediction(output.latent_prediction, batch.noisy_latents, batch.latent_time)
        errors = slot_errors(prediction, target, self.config)
        costs = errors.detach().sum(1) * weight
        return _Part(
            latent_loss(errors, weight) / count,
            sum_by_bucket(costs, batch.latent_time) / count,
            _latent_by_time(errors, batch),
        )


@dataclass(frozen=True)
class TextRows:
    """Tokens that the head predicts, (R,) each."""

    tokens: Tensor
    weight: Tensor
    """0 where the row is not scored."""
    time: Tensor


class _Part(NamedTuple):
    """The loss of one modality."""

    loss: Tensor
    by_bucket: Tensor
    """(B,): the same by time, without a graph; summed in an order that never changes."""
    by_time: Tensor
    """(2, B): see `LossTerms`."""


def _text_part(result: TextLoss, rows: TextRows, count: float | Tensor) -> _Part:
    return _Part(
        result.weighted / count,
        sum_by_bucket(result.costs, rows.time) / count,
        sums_by_time(result.nats, rows.weight > 0, rows.time),
    )


def _latent_by_time(errors: Tensor, batch: NoisyBatch) -> Tensor:
    """Slots of a document share its time, so a document is one row, and weighs as many as it has slots."""
    sums = sums_by_time(errors.sum(1), batch.latent_target > 0, batch.latent_time)
    return torch.stack([sums[0], sums[1] * errors.shape[1]])


def _at_least_one(count: float | Tensor) -> float | Tensor:
    return count.clamp(min=1.0) if isinstance(count, Tensor) else max(count, 1.0)


def length_loss(length_logits: Tensor | None, batch: NoisyBatch) -> Tensor:
    """Sum over the scored documents of the negative log-likelihood of their length."""
    assert length_logits is not None
    target = (batch.layout.lengths - 1).clamp(0, length_logits.shape[1] - 1)
    return (F.cross_entropy(length_logits, target, reduction="none") * batch.length_target).sum()


def add_terms(total: LossTerms | None, terms: LossTerms) -> LossTerms:
    """Sum of the parts over micro-batches, without their graphs."""
    if total is None:
        return terms.detached()
    names = [item.name for item in fields(terms)]
    return LossTerms(**{name: getattr(terms, name).detach() + getattr(total, name) for name in names})
