"""From a noisy micro-batch to the named parts of the loss.

Every part is a local sum divided by a count over the whole step, so the sum over micro-batches and ranks is the loss
of the step, however it was cut up.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mmldlm.config import MODES, CorruptionConfig, ObjectiveConfig
from mmldlm.corruption.latent import LatentProcess
from mmldlm.corruption.times import modes_of_run
from mmldlm.model.denoiser import Denoiser
from mmldlm.objective.balance import GradientNorm
from mmldlm.objective.buckets import NUM_BUCKETS, sum_by_bucket, sums_by_time
from mmldlm.objective.latent import latent_loss, slot_errors
from mmldlm.objective.text import TextLoss, text_loss, text_loss_of_all
from mmldlm.types import Counts, DenoiserOutput, NoisyBatch


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


@dataclass(frozen=True)
class Objective:
    """Prediction -> loss terms."""

    config: ObjectiveConfig
    latent: LatentProcess
    active: Active
    scored_rows: bool = True
    chunk_rows: int = 2048
    compiled: bool = False

    def __call__(
        self, denoiser: Denoiser, batch: NoisyBatch, counts: Counts, balance: GradientNorm | None = None
    ) -> LossTerms:
        """Run the denoiser on a noisy micro-batch and score what was corrupted."""
        if balance is not None:
            batch = balance.weigh(batch)
        output: DenoiserOutput = denoiser(
            batch.noisy_tokens, batch.noisy_latents, batch.text_time, batch.latent_time, batch.layout
        )
        zero = batch.text_time.new_zeros(())
        text, latent, length, correct, scored = zero, zero, zero, zero, zero
        text_by_time = latent_by_time = zero.new_zeros(2, NUM_BUCKETS)
        text_parts = latent_parts = zero.new_zeros(NUM_BUCKETS)
        if self.active.text:
            rows = TextRows.scored(batch) if self.scored_rows else TextRows.of_all(batch)
            result = self._text(denoiser, output, batch, rows)
            text = result.weighted / _at_least_one(counts.tokens)
            correct, scored = result.correct, result.rows
            text_by_time = sums_by_time(result.nats, rows.weight > 0, rows.time)
            if balance is not None:
                text_parts = sum_by_bucket(result.costs, rows.time) / _at_least_one(counts.tokens)
        if self.active.latent:
            target = self.latent.target(batch.latents, batch.latent_noise, batch.latent_time)
            prediction = self.latent.prediction(
                output.latent_prediction, batch.noisy_latents, batch.latent_time
            )
            errors = slot_errors(prediction, target, self.config)
            latent = latent_loss(errors, batch.latent_target) / _at_least_one(counts.slots)
            latent_by_time = _latent_by_time(errors, batch)
            if balance is not None:
                costs = errors.detach().sum(1) * batch.latent_target
                latent_parts = sum_by_bucket(costs, batch.latent_time) / _at_least_one(counts.slots)
        if self.active.length:
            length = length_loss(output.length_logits, batch) / _at_least_one(counts.documents)
        loss = self._sum(text, latent, length)
        terms = LossTerms(loss, text, latent, length, correct, scored, text_by_time, latent_by_time, loss)
        if balance is None:
            return terms
        return self._balanced(terms, balance, torch.stack([text_parts, latent_parts]))

    def _sum(self, text: Tensor, latent: Tensor, length: Tensor) -> Tensor:
        weights = self.config
        return weights.text_weight * text + weights.latent_weight * latent + weights.length_weight * length

    def _balanced(self, terms: LossTerms, balance: GradientNorm, parts: Tensor) -> LossTerms:
        """The terms of a weighed batch, whose losses by bucket are `parts`: what is trained on keeps the factors, the
        rest is reported without them."""
        text, latent = (parts / balance.factors()[:, None]).sum(1)
        loss = self._sum(text, latent, terms.length.detach())
        return replace(terms, loss=loss, text=text, latent=latent)

    def _text(
        self, denoiser: Denoiser, output: DenoiserOutput, batch: NoisyBatch, rows: TextRows
    ) -> TextLoss:
        if not self.scored_rows:
            return text_loss_of_all(denoiser.token_logits(output.token_hidden), rows.tokens, rows.weight)
        return text_loss(
            denoiser.token_head, output.token_hidden.index_select(0, batch.scored), rows.tokens, rows.weight,
            vocab_size=denoiser.shape.vocab_size, chunk_rows=self.chunk_rows, compiled=self.compiled,
        )  # fmt: skip


@dataclass(frozen=True)
class TextRows:
    """Tokens that the head is asked about, (R,) each."""

    tokens: Tensor
    weight: Tensor
    """0 where the row is not scored."""
    time: Tensor

    @classmethod
    def scored(cls, batch: NoisyBatch) -> TextRows:
        """Those that are scored, and what fills them up."""
        tokens, document = (x.index_select(0, batch.scored) for x in (batch.tokens, batch.layout.document))
        return cls(tokens, batch.scored_weight, batch.text_time[document])

    @classmethod
    def of_all(cls, batch: NoisyBatch) -> TextRows:
        """All tokens of the micro-batch."""
        time = batch.text_time[batch.layout.document]
        weight = torch.zeros_like(time).index_add(0, batch.scored, batch.scored_weight)
        return cls(batch.tokens, weight, time)


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
