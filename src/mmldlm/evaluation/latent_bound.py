"""The latent bound: how many nats a dimension of a held-out latent costs, given the right text, another, or none.

    -log p(latent) <= prior + reconstruction + 1/2 integral from 0 to G of E |latent - predicted|^2 d snr

The integral is the continuous-time variational bound of Gaussian diffusion, which depends on the schedule only
through where it visits the signal-to-noise ratio, snr = signal^2 / sigma^2. The prior term is exactly 0, because
nothing of the latent is left at time 1. The reconstruction is a Gaussian of variance 1/G around noisy / signal, so its
term is d/2 log(2 pi e / G).

The bound holds for every G. Beyond some G a network says less about the latent than the noisy latent itself; so
G is the one of a grid up to `evaluation.latent_snr` that gives the smallest bound with the right text on a few
documents, and the same for all texts. Draws are uniform in log(1 + snr), where the integrand of a standard normal is
constant.
Shapes: n documents, K draws per document, N documents of a pack, S latent slots, C latent channels, d = S * C,
B parts of the grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.corruption.joint import LatentSchedule
from mmldlm.data.store import Documents
from mmldlm.errors import UserError
from mmldlm.evaluation.bounds import TEXT_NAMES, Gain, LatentBound, LatentBounds, NoiseBucket
from mmldlm.evaluation.context import (
    LATENT_BOUND,
    Context,
    Draws,
    Progress,
    strangers,
)
from mmldlm.sampling.predictor import ModelPredictor
from mmldlm.statistics import LESS, MORE, Quantity
from mmldlm.types import Times

NUM_PARTS = 16
_LATENT_AXIS = 2
_PILOT_DOCUMENTS, _PILOT_DRAWS = 64, 8


@dataclass(frozen=True)
class LatentErrors:
    """How far predicted latents are from the true ones, over the whole range of noise, under one kind of text."""

    text: str
    parts: np.ndarray
    """(n, B) integral of the squared error over each part of the grid, mean over draws: summed they are the whole."""
    squared_error: np.ndarray
    """(B,) per dimension, mean over the draws in each part; nan where there is none."""
    edges: np.ndarray
    """(B + 1,) snr at the ends of the parts, equal in log(1 + snr)."""
    num_dimensions: int

    def nats(self, num_parts: int = NUM_PARTS) -> np.ndarray:
        """(n,) the bound of each document, all dimensions together, with G at the end of so many parts."""
        reconstruction = reconstruction_nats(self.num_dimensions, float(self.edges[num_parts]))
        return reconstruction + 0.5 * self.parts[:, :num_parts].sum(1)

    def best_parts(self) -> int:
        """How many parts give the smallest bound over all documents."""
        return int(np.argmin([self.nats(count).mean() for count in range(1, NUM_PARTS + 1)])) + 1

    def curve(self) -> list[NoiseBucket]:
        """The squared error over the noise."""
        errors = [None if math.isnan(error) else float(error) for error in self.squared_error]
        return [
            NoiseBucket(float(low), float(high), error)
            for low, high, error in zip(self.edges[:-1], self.edges[1:], errors, strict=True)
        ]


def measure_latent_bounds(context: Context) -> LatentBounds | None:
    """Nats per dimension of the latent; what the text saves."""
    if not context.active.latent:
        return None
    model, config, documents = context.model, context.config, context.selection.documents
    snr = _choose_snr(context)
    errors = {
        text: latent_errors(
            model, documents, text=text, largest_snr=snr, num_draws=config.num_draws,
            batch_tokens=config.batch_tokens, seed=context.seed, progress=context.progress,
        )
        for text in TEXT_NAMES
    }  # fmt: skip
    dimensions = errors["right"].num_dimensions
    nats = {text: one.nats() / dimensions for text, one in errors.items()}

    def gain(text: str) -> Quantity:
        title = f"nats / dimension saved by the right text, against {TEXT_NAMES[text]}"
        return Quantity(title, MORE, nats[text] - nats["right"])

    normal = normal_nats(model.normalizer.normalize(documents.latents), snr)
    return LatentBounds(
        **{text: _latent_bound(context, errors[text], nats[text]) for text in TEXT_NAMES},
        gain=Gain(
            **{text: context.record(f"latent_gain/{text}", gain(text)) for text in ("shuffled", "none")}
        ),
        normal_nats_per_dimension=float(normal.mean() / dimensions),
        reconstruction_nats_per_dimension=reconstruction_nats(1, snr),
        snr=snr,
        num_documents=len(normal),
        num_dimensions=dimensions,
        num_draws=config.num_draws,
    )


def _choose_snr(context: Context) -> float:
    """Where the bound ends, from a few documents with the right text."""
    pilot = latent_errors(
        context.model, context.selection.documents.first(_PILOT_DOCUMENTS), text="right",
        largest_snr=context.config.latent_snr, num_draws=_PILOT_DRAWS, batch_tokens=context.config.batch_tokens,
        seed=context.seed,
    )  # fmt: skip
    return float(pilot.edges[pilot.best_parts()])


def _latent_bound(context: Context, errors: LatentErrors, nats: np.ndarray) -> LatentBound:
    title = f"latent bound, {TEXT_NAMES[errors.text]}, nats / dimension"
    bound = context.record(f"latent_bound/{errors.text}", Quantity(title, LESS, nats))
    # raw coordinates differ by the normaliser's scale, one number or one per channel
    log_scale = float(np.log(context.model.normalizer.scale).mean())
    return LatentBound(bound, bound.value / math.log(2.0), bound.value + log_scale, errors.curve())


def latent_errors(
    model: LoadedModel,
    documents: Documents,
    *,
    text: str,
    largest_snr: float,
    num_draws: int,
    batch_tokens: int,
    seed: int,
    progress: Progress | None = None,
) -> LatentErrors:
    """With the `right` text, a `shuffled` one (a stranger's) or `none` (every token masked)."""
    plan = _LatentDraws(model, documents, text, largest_snr, num_draws, seed)
    corruption, predictor = replace(model.corruption, row_multiple=1), ModelPredictor.of(model)
    errors = np.empty(len(plan.owner))
    for done, rows in plan.packs(batch_tokens):
        noisy = corruption.corrupt_at(plan.batch(rows), plan.times(rows))
        inputs = (noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
        clean = predictor.predict(*inputs).latents().cpu()
        errors[rows] = (clean.double() - noisy.latents).square().sum((1, 2)).numpy()
        if progress is not None:
            progress(f"latent bound, {text} text", done, len(plan.owner))
    count, dimensions = len(documents.lengths), int(np.prod(documents.latents.shape[1:]))
    width = math.log1p(largest_snr)
    part = np.minimum((np.log1p(plan.snr) / width * NUM_PARTS).astype(np.int64), NUM_PARTS - 1)
    weighted = width * (1.0 + plan.snr) * errors / num_draws  # d snr = (1 + snr) d log(1 + snr)
    place = plan.owner * NUM_PARTS + part
    with np.errstate(invalid="ignore"):
        mean = np.bincount(part, errors, NUM_PARTS) / np.bincount(part, minlength=NUM_PARTS) / dimensions
    return LatentErrors(
        text=text,
        parts=np.bincount(place, weighted, count * NUM_PARTS).reshape(count, NUM_PARTS),
        squared_error=mean,
        edges=np.expm1(np.linspace(0.0, width, NUM_PARTS + 1)),
        num_dimensions=dimensions,
    )


def reconstruction_nats(num_dimensions: int, largest_snr: float) -> float:
    """Cost of a latent once it is known with noise of variance 1 / largest_snr."""
    return 0.5 * num_dimensions * math.log(2.0 * math.pi * math.e / largest_snr)


def normal_nats(latents: np.ndarray, largest_snr: float) -> np.ndarray:
    """(n, S, C) -> (n,) the same bound for a model that knows only mean 0 and variance 1, in closed form."""
    flat = latents.reshape(len(latents), -1).astype(np.float64)
    spread = (flat.shape[1] * math.log1p(largest_snr)) + ((flat**2).sum(1) - flat.shape[1]) * (
        largest_snr / (1.0 + largest_snr)
    )
    return reconstruction_nats(flat.shape[1], largest_snr) + 0.5 * spread


def time_of_snr(schedule: LatentSchedule, snr: np.ndarray) -> np.ndarray:
    """The time at which a schedule has this signal-to-noise ratio, by bisection: it falls from infinity to 0."""
    low, high = torch.zeros(snr.shape, dtype=torch.float64), torch.ones(snr.shape, dtype=torch.float64)
    wanted = torch.from_numpy(np.asarray(snr, dtype=np.float64))
    for _ in range(60):
        middle = 0.5 * (low + high)
        too_clean = schedule.signal(middle) ** 2 > wanted * schedule.noise(middle) ** 2
        low, high = torch.where(too_clean, middle, low), torch.where(too_clean, high, middle)
    return (0.5 * (low + high)).numpy()


class _LatentDraws(Draws):
    """Which document gets which time, noise and text: K entries for each of n documents."""

    def __init__(
        self,
        model: LoadedModel,
        documents: Documents,
        text: str,
        largest_snr: float,
        num_draws: int,
        seed: int,
    ) -> None:
        if text not in TEXT_NAMES:
            raise UserError(f"text={text}: allowed are {', '.join(TEXT_NAMES)}")
        count = len(documents.lengths)
        partner = strangers(count, seed) if text == "shuffled" else np.arange(count)
        pieces = documents.split_tokens()
        super().__init__(
            tokens=[pieces[document] for document in partner],
            lengths=documents.lengths[partner],
            latents=model.normalizer.normalize(documents.latents),
            keys=randomness.make_key(seed, LATENT_BOUND, documents.ids[:, None], np.arange(num_draws)),
        )
        self.text_time = np.float32(1.0 if text == "none" else 0.0)
        shift = randomness.low_discrepancy(np.arange(count), _LATENT_AXIS, seed)[:, None]
        places = (np.arange(num_draws) + shift.astype(np.float64)) / num_draws
        self.snr = np.expm1(places * math.log1p(largest_snr)).reshape(-1)
        self.latent_time = time_of_snr(model.corruption.latent.schedule, self.snr).astype(np.float32)

    def times(self, rows: np.ndarray) -> Times:
        yes = np.ones(len(rows), dtype=bool)
        return Times(np.full(len(rows), self.text_time), self.latent_time[rows], ~yes, yes)
