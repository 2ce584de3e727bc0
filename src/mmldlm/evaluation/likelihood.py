"""The text bound: how many nats a token of held-out text costs, given the right latent, another one, or none.

    bound = E_t [ p'(t) / p(t) * sum over masked tokens of -log P(token | noisy text, latent) ] / tokens

This is the continuous-time bound of masked diffusion (MDLM); p(t) is the share of masked tokens. The text is
scored given its length; what the length costs is told apart. Masking and weights are those of training.

Shapes: n documents, K draws per document, N documents of a pack, R scored rows, D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from mmldlm import randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.data.store import Documents
from mmldlm.errors import UserError
from mmldlm.evaluation.calibration import Answers
from mmldlm.evaluation.curves import Curve
from mmldlm.evaluation.draws import Draws
from mmldlm.evaluation.statistics import BOUND, Estimate, Progress, ratio_estimate, strangers
from mmldlm.model.denoiser import Denoiser
from mmldlm.sampling.checks import trained_parts
from mmldlm.types import NoisyBatch, Times, to_device

LATENTS = ("right", "shuffled", "none")
NUM_BUCKETS = 10
_TEXT_AXIS = 1
_CHUNK_ROWS = {"cpu": 128, "cuda": 4096}
"""Rows of logits that exist at a time; few enough to stay in a CPU's cache."""


@dataclass(frozen=True)
class Bound:
    """The text bound of some documents under one kind of latent."""

    latent: str
    nats: np.ndarray
    """(n,) nats of each document's text, mean over its draws."""
    num_tokens: np.ndarray
    """(n,)"""
    length_nats: np.ndarray | None
    """(n,) nats of each document's length; None where the length is given."""
    num_draws: int
    per_token: Estimate
    """Nats per token, all documents together."""
    time_curve: Curve
    """Masked tokens by the text_time they were masked at."""
    answers: Answers
    """The most probable token of every masked one: how sure, and whether right."""

    def to_json(self) -> dict[str, Any]:
        """Plain values, without those of single documents."""
        tokens, documents = int(self.num_tokens.sum()), len(self.nats)
        length = None if self.length_nats is None else float(self.length_nats.sum())
        return {
            "nats_per_token": self.per_token.value,
            "bits_per_token": self.per_token.value / math.log(2.0),
            "perplexity": perplexity(self.per_token.value),
            "perplexity_interval": [perplexity(self.per_token.low), perplexity(self.per_token.high)],
            "standard_error": self.per_token.standard_error,
            "interval": [self.per_token.low, self.per_token.high],
            "length_nats_per_document": None if length is None else length / documents,
            "length_nats_per_token": None if length is None else length / tokens,
            "num_documents": documents,
            "num_tokens": tokens,
            "num_draws": self.num_draws,
            "time_curve": self.time_curve.to_json(),
        }


@dataclass(frozen=True)
class Scores:
    """What the denoiser says about the scored tokens of one noisy pack, on the host in float64."""

    document: np.ndarray
    """(R,) document of the pack."""
    weight: np.ndarray
    """(R,) weight in the bound."""
    nats: np.ndarray
    """(R,) -log P(right token)"""
    confidence: np.ndarray
    """(R,) P(most probable token)"""
    correct: np.ndarray
    """(R,) 1 where the most probable token is the right one."""
    length_nats: np.ndarray | None
    """(N,)"""

    def document_nats(self, num_documents: int) -> np.ndarray:
        """(N,) this draw's estimate of each document's bound."""
        return np.bincount(self.document, self.weight * self.nats, num_documents)


def text_bound(
    model: LoadedModel,
    documents: Documents,
    *,
    latent: str,
    num_draws: int,
    batch_tokens: int,
    seed: int,
    positions: np.ndarray | None = None,
    progress: Progress | None = None,
) -> Bound:
    """The bound with the `right` latent, a `shuffled` one (a stranger's) or `none` (pure noise).

    `positions` (n,) spread the times of the documents; None: their places, which gives the mean the least noise.
    """
    count = len(documents.lengths)
    sums, length_sums = np.zeros(count), np.zeros(count)
    by_time, answers = Curve.empty(NUM_BUCKETS), Answers()
    corruption = replace(model.corruption, text_weighting="bound", row_multiple=1)
    plan = _Plan(model, documents, latent, num_draws, seed, positions)
    for done, rows in plan.packs(batch_tokens):
        noisy = corruption.corrupt_at(plan.batch(rows), plan.times(rows))
        with model.autocast():
            scores = score(model.denoiser, to_device(noisy, model.device))
        np.add.at(sums, plan.owner[rows], scores.document_nats(len(rows)))
        if scores.length_nats is not None:
            np.add.at(length_sums, plan.owner[rows], scores.length_nats)
        by_time.add(plan.text_time[rows][scores.document], scores.nats, scores.correct)
        answers.add(plan.owner[rows][scores.document], scores.confidence, scores.correct)
        if progress is not None:
            progress(f"text bound, {latent} latent", done, len(plan.owner))
    modelled = trained_parts(model).length
    return Bound(
        latent=latent,
        nats=sums / num_draws,
        num_tokens=documents.lengths,
        length_nats=length_sums / num_draws if modelled else None,
        num_draws=num_draws,
        per_token=ratio_estimate(sums / num_draws, documents.lengths.astype(np.float64), seed),
        time_curve=by_time,
        answers=answers,
    )


def perplexity(nats_per_token: float) -> float:
    """exp, infinite where it would overflow."""
    return math.exp(nats_per_token) if nats_per_token < 700.0 else math.inf


@torch.inference_mode()
def score(denoiser: Denoiser, batch: NoisyBatch) -> Scores:
    """Run the denoiser on a noisy pack and score its masked tokens, a chunk of rows at a time."""
    output = denoiser(
        batch.noisy_tokens, batch.noisy_latents, batch.text_time, batch.latent_time, batch.layout
    )
    rows = batch.scored[batch.scored_weight > 0]
    size = _CHUNK_ROWS.get(rows.device.type, 1024)
    parts = [
        _score_rows(denoiser.token_logits(output.token_hidden[some]), batch.tokens[some])
        for some in rows.split(size)
    ]
    nats, confidence, correct = torch.cat(parts, dim=1).double().cpu().numpy()
    length_nats = None
    if output.length_logits is not None:
        target = batch.layout.lengths - 1
        length_nats = F.cross_entropy(output.length_logits, target, reduction="none").double().cpu().numpy()
    return Scores(
        document=batch.layout.document[rows].cpu().numpy(),
        weight=batch.scored_weight[batch.scored_weight > 0].double().cpu().numpy(),
        nats=nats,
        confidence=confidence,
        correct=correct,
        length_nats=length_nats,
    )


def _score_rows(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(rows, V), (rows,) -> (3, rows): nats of the right token, probability of the best one, whether it is right."""
    total = logits.logsumexp(-1)
    best, choice = logits.max(-1)
    nats = total - logits.gather(1, target[:, None]).squeeze(1)
    right = (choice == target).float()
    return torch.stack([nats, (best - total).exp(), right])


class _Plan(Draws):
    """Which document gets which time, noise and latent."""

    def __init__(
        self,
        model: LoadedModel,
        documents: Documents,
        latent: str,
        num_draws: int,
        seed: int,
        positions: np.ndarray | None,
    ) -> None:
        count = len(documents.lengths)
        if latent not in LATENTS:
            raise UserError(f"latent={latent}: allowed are {', '.join(LATENTS)}")
        longest = model.denoiser.shape.max_length
        if model.denoiser.length_head is not None and documents.lengths.max(initial=0) > longest:
            raise UserError(f"a document has more tokens than this model can give a length to ({longest})")
        partner = strangers(count, seed) if latent == "shuffled" else np.arange(count)
        super().__init__(
            tokens=np.split(documents.tokens, np.cumsum(documents.lengths)[:-1]),
            lengths=documents.lengths,
            latents=model.normalizer.normalize(documents.latents)[partner],
            keys=randomness.make_key(seed, BOUND, documents.ids[:, None], np.arange(num_draws)),
        )
        self.latent_time = np.float32(1.0 if latent == "none" else 0.0)
        positions = np.arange(count) if positions is None else positions
        self.text_time = text_times(positions, num_draws, seed).reshape(-1)

    def times(self, rows: np.ndarray) -> Times:
        yes = np.ones(len(rows), dtype=bool)
        return Times(self.text_time[rows], np.full(len(rows), self.latent_time), yes, ~yes)


def text_times(positions: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """(n, K) float32: draw k of every document lies in the k-th of K equal parts of [0, 1].

    Inside their part documents at neighbouring positions are evenly spread.
    """
    shift = randomness.low_discrepancy(positions, _TEXT_AXIS, seed)
    return ((np.arange(num_draws) + shift[:, None]) / num_draws).astype(np.float32)
