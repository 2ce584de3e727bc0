"""From a noisy micro-batch to the named parts of the loss.

Every part is a local sum divided by a count over the whole step, so the sum over micro-batches and ranks is the loss
of the step, however it was cut up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.config import MODES, CorruptionConfig, ObjectiveConfig
from mmldlm.corruption.latent import LatentProcess
from mmldlm.corruption.times import modes_of_run
from mmldlm.model.denoiser import Denoiser
from mmldlm.objective.buckets import NUM_BUCKETS, sums_by_time
from mmldlm.objective.latent import latent_loss, slot_errors
from mmldlm.objective.text import TextLoss, text_loss, text_loss_of_all
from mmldlm.types import Counts, DenoiserOutput, NoisyBatch


@dataclass
class LossTerms:
    """Parts of the loss, already divided by their counts; `loss` is their weighted sum."""

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
    """(2, buckets): sum of errors of the scored slots of each latent time, and their number."""

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


@dataclass(frozen=True)
class Objective:
    """Prediction -> loss terms."""

    config: ObjectiveConfig
    latent: LatentProcess
    active: Active
    scored_rows: bool = True
    chunk_rows: int = 2048
    compiled: bool = False

    def __call__(self, denoiser: Denoiser, batch: NoisyBatch, counts: Counts) -> LossTerms:
        """Run the denoiser on a noisy micro-batch and score what was corrupted."""
        output: DenoiserOutput = denoiser(
            batch.noisy_tokens, batch.noisy_latents, batch.text_time, batch.latent_time, batch.layout
        )
        zero = batch.text_time.new_zeros(())
        text, latent, length, correct, scored = zero, zero, zero, zero, zero
        text_by_time = latent_by_time = zero.new_zeros(2, NUM_BUCKETS)
        if self.active.text:
            result = self._text(denoiser, output, batch)
            text = result.weighted / _at_least_one(counts.tokens)
            correct, scored = result.correct, result.rows
            text_by_time = self._text_by_time(result.nats, batch)
        if self.active.latent:
            target = self.latent.target(batch.latents, batch.latent_noise, batch.latent_time)
            prediction = self.latent.prediction(
                output.latent_prediction, batch.noisy_latents, batch.latent_time
            )
            errors = slot_errors(prediction, target)
            latent = latent_loss(errors, batch.latent_target) / _at_least_one(counts.slots)
            latent_by_time = _latent_by_time(errors, batch)
        if self.active.length:
            length = length_loss(output.length_logits, batch) / _at_least_one(counts.documents)
        weights = self.config
        loss = weights.text_weight * text + weights.latent_weight * latent + weights.length_weight * length
        return LossTerms(loss, text, latent, length, correct, scored, text_by_time, latent_by_time)

    def _text(self, denoiser: Denoiser, output: DenoiserOutput, batch: NoisyBatch) -> TextLoss:
        if self.scored_rows:
            return text_loss(
                denoiser.token_head,
                output.token_hidden.index_select(0, batch.scored),
                batch.tokens.index_select(0, batch.scored),
                batch.scored_weight,
                vocab_size=denoiser.shape.vocab_size,
                chunk_rows=self.chunk_rows,
                compiled=self.compiled,
            )
        weights = batch.scored_weight.new_zeros(len(batch.tokens))
        weights = weights.index_add(0, batch.scored, batch.scored_weight)
        return text_loss_of_all(denoiser.token_logits(output.token_hidden), batch.tokens, weights)

    def _text_by_time(self, nats: Tensor, batch: NoisyBatch) -> Tensor:
        time = batch.text_time[batch.layout.document]
        if self.scored_rows:
            return sums_by_time(nats, batch.scored_weight > 0, time[batch.scored])
        rows = torch.zeros_like(time).index_add(0, batch.scored, batch.scored_weight)
        return sums_by_time(nats, rows > 0, time)


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
