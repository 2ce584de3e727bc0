"""The latent bound: how many nats a dimension of a held-out latent costs, given the right text, another, or none.

    -log p(latent) <= prior + reconstruction + 1/2 integral from 0 to G of E |latent - predicted|^2 d snr

The integral is the continuous-time variational bound of Gaussian diffusion, which depends on the schedule only
through where it visits the signal-to-noise ratio, snr = signal^2 / sigma^2. The prior term is exactly 0, because
nothing of the latent is left at time 1. The reconstruction is a Gaussian of variance 1/G around noisy / signal, so its
term is d/2 log(2 pi e / G).

The bound holds for every G. Beyond some G a network tells less about the latent than the noisy latent itself; so
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
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.corruption.schedule import LatentSchedule
from mmldlm.data.store import Documents
from mmldlm.errors import UserError
from mmldlm.evaluation.draws import Draws
from mmldlm.evaluation.statistics import LATENT_BOUND, Progress, strangers
from mmldlm.sampling.predictor import ModelPredictor
from mmldlm.types import Times

TEXTS = ("right", "shuffled", "none")
NUM_PARTS = 16
_LATENT_AXIS = 2


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

    def curve(self) -> list[dict[str, float]]:
        """The squared error over the noise, as plain values."""
        ends = zip(self.edges[:-1], self.edges[1:], self.squared_error, strict=True)
        return [{"low": float(a), "high": float(b), "squared_error": float(error)} for a, b, error in ends]


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
    plan = _Plan(model, documents, text, largest_snr, num_draws, seed)
    corruption, predictor = replace(model.corruption, row_multiple=1), ModelPredictor(model)
    errors, no_rows = np.empty(len(plan.owner)), torch.empty(0, dtype=torch.int64)
    for done, rows in plan.packs(batch_tokens):
        noisy = corruption.corrupt_at(plan.batch(rows), plan.times(rows))
        inputs = (noisy.noisy_tokens, noisy.noisy_latents, noisy.text_time, noisy.latent_time, noisy.layout)
        found = predictor.predict(*inputs, rows=no_rows)
        errors[rows] = (found.clean_latents.double() - noisy.latents).square().sum((1, 2)).numpy()
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


class _Plan(Draws):
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
        if text not in TEXTS:
            raise UserError(f"text={text}: allowed are {', '.join(TEXTS)}")
        count = len(documents.lengths)
        partner = strangers(count, seed) if text == "shuffled" else np.arange(count)
        pieces = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
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
