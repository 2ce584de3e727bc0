"""The text bound: how many nats a token of held-out text costs, given the right latent, another one, or none.

    bound = E_t [ p'(t) / p(t) * sum over masked tokens of -log P(token | noisy text, latent) ] / tokens

This is the continuous-time bound of masked diffusion (MDLM); p(t) is the share of masked tokens. The text is
scored given its length; the cost of the length is reported separately. Masking and weights are those of training.

For a single text the same integral is written as a sum over the number m of masked tokens, where p has the
distribution Beta(m, L - m + 1):

    bound = sum over m of 1/m * E [ sum over m masked tokens, chosen at random, of -log P(token | noisy text, latent) ]

So no draw is spent on a text without a mask, and no weight exceeds the length L.

Shapes: n documents, K draws per document, N documents of a pack, R scored rows, D width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import betaincinv

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import leaves_condition_out
from mmldlm.corruption.joint import TextSchedule
from mmldlm.data.store import Documents
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import (
    LATENT_NAMES,
    Answers,
    Calibration,
    Gain,
    LatentCalibration,
    Reliability,
    TextBound,
    TextBounds,
    calibration_error,
    equal_mass,
    equal_width,
    reliability,
    time_curve,
)
from mmldlm.evaluation.context import BOUND, Context, Draws, Progress, strangers
from mmldlm.model.denoiser import Denoiser
from mmldlm.statistics import LESS, MORE, Estimate, Quantity
from mmldlm.types import NoisyBatch, Times, to_device

_TEXT_AXIS = 1
_CHUNK_ROWS = {"cpu": 128, "cuda": 4096}
"""Rows of logits that exist at a time; few enough to stay in a CPU's cache."""


@dataclass(frozen=True)
class Costs:
    """What the texts of some documents cost under one kind of latent."""

    latent: str
    nats: np.ndarray
    """(n,) nats of each document's text, mean over its draws."""
    num_tokens: np.ndarray
    """(n,)"""
    length_nats: np.ndarray | None
    """(n,) nats of each document's length; None where the length is given."""
    answers: Answers

    def quantity(self) -> Quantity:
        """Nats per token, all documents together."""
        title = f"text bound, {LATENT_NAMES[self.latent]}, nats / token"
        return Quantity(title, LESS, self.nats, self.num_tokens)


@dataclass(frozen=True)
class Scores:
    """What the denoiser predicts for the scored tokens of one noisy pack, on the host in float64."""

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


def measure_text_bounds(context: Context) -> tuple[TextBounds, Calibration] | tuple[None, None]:
    """Nats per token, per byte and per character; what the latent saves; calibration."""
    if not context.active.text:
        context.notes.append("the text bound and decoding are left out: this run has no loss on text")
        return None, None
    _note_limits(context)
    costs = {
        latent: text_costs(
            context.model, context.selection.documents, latent=latent, num_draws=context.config.num_draws,
            batch_tokens=context.config.batch_tokens, seed=context.seed, progress=context.progress,
        )
        for latent in LATENT_NAMES
    }  # fmt: skip
    sizes, num_changed = _text_sizes(context)
    bounds = {latent: _text_bound(context, one, sizes) for latent, one in costs.items()}
    calibration = {
        latent: _calibration(context, one.answers, latent, LATENT_NAMES[latent])
        for latent, one in costs.items()
    }
    right = costs["right"]
    result = TextBounds(
        **bounds,
        gain=Gain(**{name: _gain(context, costs[name], right) for name in ("shuffled", "none")}),
        num_documents=len(right.nats),
        num_tokens=int(right.num_tokens.sum()),
        num_draws=context.config.num_draws,
        num_changed=num_changed,
    )
    return result, Calibration(**calibration)


def _note_limits(context: Context) -> None:
    if not leaves_condition_out(context.model.config.corruption):
        context.notes.append(
            "'no latent' is outside of what this run was trained on: it has no joint mode and "
            "corruption.condition_dropout=0"
        )
    if not context.decodes:
        context.notes.append(
            "this run never saw a latent (corruption.condition_dropout=1): of the text bounds only 'no latent' is "
            "about what it was trained for, and decoding is left out"
        )


def _text_bound(context: Context, costs: Costs, sizes: dict[str, np.ndarray]) -> TextBound:
    per_token = context.record(f"text_bound/{costs.latent}", costs.quantity())
    bits: dict[str, Estimate | None] = dict.fromkeys(("byte", "character"))
    for unit, size in sizes.items():
        title = f"text bound, {LATENT_NAMES[costs.latent]}, bits / {unit}"
        quantity = Quantity(title, LESS, costs.nats / math.log(2.0), size)
        bits[unit] = context.record(f"bits_per_{unit}/{costs.latent}", quantity)
    return TextBound(
        nats_per_token=per_token,
        bits_per_token=per_token.value / math.log(2.0),
        perplexity=perplexity(per_token.value),
        bits_per_byte=bits["byte"],
        bits_per_character=bits["character"],
        length_nats_per_document=None if costs.length_nats is None else float(costs.length_nats.mean()),
        time_curve=time_curve(costs.answers),
        perplexity_with_end=perplexity_with_end(costs),
    )


def perplexity_with_end(costs: Costs) -> float | None:
    """The length in the place of the end token that MDLM and autoregressive models write and count."""
    if costs.length_nats is None:
        return None
    nats = costs.nats.sum() + costs.length_nats.sum()
    return perplexity(float(nats / (costs.num_tokens.sum() + len(costs.nats))))


def _calibration(context: Context, answers: Answers, latent: str, name: str) -> LatentCalibration:
    """Calibration error and reliability diagram, in buckets of equal width and of equal mass."""
    count = len(context.selection.documents.lengths)

    def measure(kind: str, edges: np.ndarray) -> Reliability:
        title = f"calibration error, {name}, buckets of {kind.replace('_', ' ')}"
        quantity = calibration_error(answers, edges, count, title)
        error = context.record(f"calibration/{latent}/{kind}", quantity)
        return Reliability(error, reliability(answers, edges))

    return LatentCalibration(
        measure("equal_width", equal_width()), measure("equal_mass", equal_mass(answers.confidence))
    )


def _gain(context: Context, costs: Costs, right: Costs) -> Estimate:
    title = f"nats / token saved by the right latent, against {LATENT_NAMES[costs.latent]}"
    quantity = Quantity(title, MORE, costs.nats - right.nats, right.num_tokens)
    return context.record(f"text_gain/{costs.latent}", quantity)


def _text_sizes(context: Context) -> tuple[dict[str, np.ndarray], int]:
    """Bytes (UTF-8) and characters of each text before the tokenizer, and how many texts it changes.

    Without the texts there are no sizes.
    """
    texts = [text for text in context.selection.texts if text is not None]
    if len(texts) < len(context.selection.texts):
        context.notes.append("no bits per byte: the pair store does not hold the texts themselves")
        return {}, 0
    changed = 0
    if context.decode_text is not None:
        again = context.decode_text(context.selection.documents.split_tokens())
        changed = sum(a != b for a, b in zip(texts, again, strict=True))
        if changed:
            context.notes.append(
                f"the tokenizer does not reproduce {changed} of {len(texts)} texts exactly (case, spaces or unknown "
                "characters), so bits per byte leave out what it loses"
            )
    sizes = {
        "byte": np.array([len(text.encode("utf-8", "replace")) for text in texts]),
        "character": np.array([len(text) for text in texts]),
    }
    return sizes, changed


def text_costs(
    model: LoadedModel,
    documents: Documents,
    *,
    latent: str,
    num_draws: int,
    batch_tokens: int,
    seed: int,
    progress: Progress | None = None,
) -> Costs:
    """With the `right` latent, a `shuffled` one (a stranger's) or `none` (pure noise)."""
    count = len(documents.lengths)
    sums, length_sums = np.zeros(count), np.zeros(count)
    answers: list[Answers] = []
    corruption = replace(model.corruption, row_multiple=1)
    plan = _TextDraws(model, documents, latent, num_draws, seed)
    for done, rows in plan.packs(batch_tokens):
        noisy = corruption.corrupt_at(plan.batch(rows), plan.times(rows))
        with model.autocast():
            scores = score(model.denoiser, to_device(noisy, model.device), corruption.text.schedule)
        np.add.at(sums, plan.owner[rows], scores.document_nats(len(rows)))
        if scores.length_nats is not None:
            np.add.at(length_sums, plan.owner[rows], scores.length_nats)
        owner, time = plan.owner[rows][scores.document], plan.text_time[rows][scores.document]
        answers.append(Answers(owner, scores.confidence, scores.correct, time, scores.nats))
        if progress is not None:
            progress(f"text bound, {latent} latent", done, len(plan.owner))
    lengths = length_sums / num_draws if model.trained.length else None
    return Costs(latent, sums / num_draws, documents.lengths, lengths, Answers.join(answers))


def drawn_costs(
    model: LoadedModel,
    documents: Documents,
    *,
    latent: str,
    num_draws: int,
    batch_tokens: int,
    seed: int,
) -> np.ndarray:
    """(n, K) unbiased estimates, in nats, of the bound of each text, which do not depend on the other texts.

    The draws of a text are in order of the number of its masked tokens, which is evenly spread.
    """
    corruption = replace(model.corruption, row_multiple=1)
    plan = _CountedDraws(model, documents, latent, num_draws, seed)
    nats = np.empty(len(plan.owner))
    for _, rows in plan.packs(batch_tokens):
        noisy = plan.mask(rows, corruption.corrupt_at(plan.batch(rows), plan.times(rows)))
        with model.autocast():
            scores = score(model.denoiser, to_device(noisy, model.device), corruption.text.schedule)
        scores = replace(scores, weight=plan.weight[rows][scores.document])
        nats[rows] = scores.document_nats(len(rows))
    return nats.reshape(-1, num_draws)


def standard_errors(draws: np.ndarray) -> np.ndarray:
    """(n,) standard errors of the means of (n, K) ordered draws, from differences of neighbours; nan for one draw.

    The first and the last draw have one neighbour, so its difference counts twice: few masked tokens vary most.
    """
    count = draws.shape[1]
    if count < 2:
        return np.full(len(draws), np.nan)
    weights = np.full(count - 1, 0.5)
    weights[[0, -1]] = 1.0
    errors: np.ndarray = np.sqrt(np.diff(draws) ** 2 @ weights) / count
    return errors


def perplexity(nats_per_token: float) -> float:
    """exp, infinite where it would overflow."""
    return math.exp(nats_per_token) if nats_per_token < 700.0 else math.inf


@torch.inference_mode()
def score(denoiser: Denoiser, batch: NoisyBatch, schedule: TextSchedule) -> Scores:
    """Run the denoiser on a noisy pack and score its masked tokens, a chunk of rows at a time."""
    output = denoiser(
        batch.noisy_tokens, batch.noisy_latents, batch.text_time, batch.latent_time, batch.layout
    )
    rows = batch.scored[batch.scored_real]
    document = batch.layout.document[rows]
    chunks = rows.split(_CHUNK_ROWS.get(rows.device.type, 1024))
    parts = [
        _score_rows(denoiser.token_logits(output.token_hidden[some]), batch.tokens[some]) for some in chunks
    ]
    nats, confidence, correct = torch.cat(parts, dim=1).cpu().double().numpy()
    length_nats = None
    if output.length_logits is not None:
        target = batch.layout.lengths - 1
        length_nats = F.cross_entropy(output.length_logits, target, reduction="none").cpu().double().numpy()
    return Scores(
        document=document.cpu().numpy(),
        weight=schedule.bound_weight(batch.text_time[document].cpu()).double().numpy(),
        nats=nats,
        confidence=confidence,
        correct=correct,
        length_nats=length_nats,
    )


def _score_rows(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """(rows, V) -> (3, rows): nats of the right token, probability of the best one, whether it is right."""
    total = logits.logsumexp(-1)
    best, choice = logits.max(-1)
    nats = total - logits.gather(1, target[:, None]).squeeze(1)
    return torch.stack([nats, (best - total).exp(), (choice == target).float()])


class _TextDraws(Draws):
    """Which document gets which time, noise and latent."""

    def __init__(
        self,
        model: LoadedModel,
        documents: Documents,
        latent: str,
        num_draws: int,
        seed: int,
    ) -> None:
        count, longest = len(documents.lengths), model.denoiser.shape.max_length
        if latent not in LATENT_NAMES:
            raise UserError(f"latent={latent}: allowed are {', '.join(LATENT_NAMES)}")
        if model.denoiser.length_head is not None and documents.lengths.max(initial=0) > longest:
            raise UserError(
                f"document {documents.lengths.argmax()} has {documents.lengths.max()} tokens, and this model knows "
                f"lengths up to {longest}; shorten it, or leave it out"
            )
        partner = strangers(count, seed) if latent == "shuffled" else np.arange(count)
        super().__init__(
            tokens=documents.split_tokens(),
            lengths=documents.lengths,
            latents=model.normalizer.normalize(documents.latents)[partner],
            keys=randomness.make_key(seed, BOUND, documents.ids[:, None], np.arange(num_draws)),
        )
        self.latent_time = np.float32(1.0 if latent == "none" else 0.0)
        self.text_time = text_times(np.arange(count), num_draws, seed).reshape(-1)

    def times(self, rows: np.ndarray) -> Times:
        yes = np.ones(len(rows), dtype=bool)
        return Times(self.text_time[rows], np.full(len(rows), self.latent_time), yes, ~yes)


class _CountedDraws(_TextDraws):
    """Draws with a given number of masked tokens; the numbers and times of a document depend on its id alone."""

    def __init__(
        self, model: LoadedModel, documents: Documents, latent: str, num_draws: int, seed: int
    ) -> None:
        super().__init__(model, documents, latent, num_draws, seed)
        lengths = self.lengths[self.owner]
        # a shift of its own for each draw: with a common one the deviations of all draws would add up
        shift = randomness.uniform(self.keys, randomness.TIME_SHIFT, np.zeros(1, np.uint64))
        part = np.tile(np.arange(num_draws), len(documents.lengths))
        place = (part + shift.astype(np.float64)) / num_draws * lengths
        self.num_masked = np.minimum(place.astype(np.int64) + 1, lengths)
        probability = betaincinv(
            self.num_masked, lengths - self.num_masked + 1, place - (self.num_masked - 1)
        )
        schedule = model.corruption.text.schedule
        self.text_time = schedule.time_of(torch.from_numpy(probability)).float().numpy()
        self.weight = lengths / self.num_masked
        """(n * K,) 1 / m over the probability 1 / L of each number m."""
        self.mask_id = model.corruption.text.mask_id

    def mask(self, rows: np.ndarray, noisy: NoisyBatch) -> NoisyBatch:
        """The pack of these draws, with as many tokens of each masked as drawn."""
        document, position = noisy.layout.document.numpy(), noisy.layout.position.numpy()
        chance = randomness.uniform(self.keys[rows][document], randomness.TEXT_MASK, position)
        order = np.lexsort((chance, document))  # documents stay where they are, their tokens are shuffled
        masked = np.empty(len(order), dtype=bool)
        masked[order] = position < self.num_masked[rows][document]
        where = torch.from_numpy(masked)
        return replace(
            noisy,
            noisy_tokens=noisy.tokens.masked_fill(where, self.mask_id),
            scored=torch.nonzero(where).squeeze(1),
            scored_real=torch.ones(int(masked.sum()), dtype=torch.bool),
        )


def text_times(positions: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """(n, K) float32: draw k of every document lies in the k-th of K equal parts of [0, 1].

    Inside their part documents at neighbouring positions are evenly spread.
    """
    shift = randomness.low_discrepancy(positions, _TEXT_AXIS, seed)
    return ((np.arange(num_draws) + shift[:, None]) / num_draws).astype(np.float32)
