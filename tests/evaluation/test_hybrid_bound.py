"""The text bound of hybrid noise: the exact denoiser pays the information of each text, and training minimises it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.config import Config, CorruptionConfig, ObjectiveConfig
from mmldlm.corruption.joint import Corruption
from mmldlm.evaluation.calibration import calibration_error, equal_width
from mmldlm.evaluation.likelihood import score, text_bound
from mmldlm.layout import Layout, packed_layout
from mmldlm.objective.joint import Active, Objective
from mmldlm.types import Counts, DenoiserOutput, NoisyBatch, Times
from tests import batches
from tests.evaluation.toys import (
    LENGTH,
    MAX_LENGTH,
    TEXTS,
    VOCAB,
    Oracle,
    draw_documents,
    joint_distribution,
    oracle_model,
)

JOINT = joint_distribution()
STATES = np.array(list(itertools.product(range(VOCAB + 1), repeat=LENGTH)))
"""Every noisy text."""


class HybridOracle(Oracle):
    """P(token | the other noisy tokens, latent)."""

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(JOINT)
        self.process = corruption.text

    def __call__(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        prior = self.joint[(noisy_latents[:, 0, 0] > 0).long()]
        clean, random, _ = (level.double()[:, None, None] for level in self.process.levels(text_time))
        seen = noisy_tokens.view(-1, 1, LENGTH)
        fits = torch.where(seen == self.texts, clean + random / VOCAB, random / VOCAB)
        fits = torch.where(seen == VOCAB, torch.ones_like(fits), fits).log()  # (N, Q, L)
        others = fits.sum(2, keepdim=True) - fits + prior.log()[:, :, None]
        one_hot = torch.nn.functional.one_hot(self.texts, VOCAB).double()
        marginal = torch.einsum("nql,qlv->nlv", others.softmax(1), one_hot).reshape(-1, VOCAB)
        lengths = torch.zeros(len(text_time), MAX_LENGTH)
        return DenoiserOutput(marginal.log(), noisy_latents, lengths)


def hybrid_model(schedule: str):
    settings = CorruptionConfig(text_schedule=schedule, text_noise="hybrid", uniform_share=0.4)
    corruption = Corruption(settings, 0, VOCAB, "uniform", 8)
    return replace(
        oracle_model(JOINT, schedule=schedule),
        denoiser=HybridOracle(corruption),
        config=Config(corruption=settings),
        corruption=corruption,
    )


def noisy_batch(model, text: np.ndarray, time: float, kind: int) -> NoisyBatch:
    """One text in every state of noise."""
    count = len(STATES)
    latents, rows = torch.full((count, 1, 2), 2.0 * kind - 1.0), torch.arange(count * LENGTH)
    weight = model.corruption.text.schedule.bound_weight(torch.tensor(time, dtype=torch.float64))
    return NoisyBatch(
        layout=packed_layout(np.full(count, LENGTH), 1),
        tokens=torch.from_numpy(np.tile(text, count)),
        latents=latents,
        noisy_tokens=torch.from_numpy(STATES.reshape(-1)),
        noisy_latents=latents,
        latent_noise=latents,
        text_time=torch.full((count,), time, dtype=torch.float64),
        latent_time=torch.zeros(count),
        latent_target=torch.zeros(count),
        length_target=torch.ones(count),
        scored=rows,
        scored_weight=weight.expand(len(rows)),
    )


def test_the_oracle_pays_exactly_the_information_of_each_text() -> None:
    """All states of noise are summed, and the root of time is integrated by Gauss-Legendre."""
    model = hybrid_model("linear")
    process = model.corruption.text
    nodes, node_weights = np.polynomial.legendre.leggauss(24)
    for kind, index in ((0, 0), (1, 14), (0, 25)):
        bound = 0.0
        for root, node_weight in zip((nodes + 1) / 2, node_weights * (nodes + 1) / 2, strict=True):
            levels = process.levels(torch.tensor(root**2, dtype=torch.float64))
            clean, random, masked = (float(level) for level in levels)
            each = np.where(
                STATES == VOCAB, masked, random / VOCAB + np.where(TEXTS[index] == STATES, clean, 0.0)
            )
            scores = score(model.denoiser, noisy_batch(model, TEXTS[index], root**2, kind), process)
            bound += node_weight * float(each.prod(1) @ scores.document_nats(len(STATES)))
        information = -np.log(JOINT[kind, index] / JOINT[kind].sum())
        np.testing.assert_allclose(bound, information, rtol=1e-5)


def test_the_estimate_is_the_entropy_and_masked_tokens_are_calibrated() -> None:
    documents, drawn = draw_documents(JOINT, 3000)
    model = hybrid_model("cosine")
    bound = text_bound(model, documents, latent="right", num_draws=8, batch_tokens=4096, seed=3)
    information = -np.log(JOINT / JOINT.sum(1, keepdims=True)).reshape(-1)[drawn]
    spread = (bound.nats - information).std() / np.sqrt(len(drawn)) / LENGTH
    assert spread < 0.02
    assert abs(bound.per_token.value - information.mean() / LENGTH) < 4 * spread
    error = calibration_error(bound.answers, equal_width(), len(drawn), "masked tokens").estimate(0)
    assert error.value < 0.05
    masked = sum(row["num_tokens"] for row in bound.to_json()["time_curve"])
    assert masked < 0.4 * 3000 * LENGTH * 8  # the cosine schedule, and no random tokens


def test_the_bound_is_the_training_objective_at_the_same_times() -> None:
    documents = batches.small_documents()
    denoiser, corruption = batches.small_denoiser(), batches.small_corruption(text_noise="hybrid")
    count = len(documents.lengths)
    yes = np.ones(count, dtype=bool)
    times = Times(np.linspace(0.1, 1, count, dtype=np.float32), np.zeros(count, np.float32), yes, ~yes)
    noisy = corruption.corrupt_at(batches.batch_of(documents), times)
    active = Active.of(Config().corruption, ObjectiveConfig(), length_modelled=True)
    objective = Objective(ObjectiveConfig(), corruption.latent, active, text=corruption.text)
    with torch.no_grad():
        terms = objective(denoiser, noisy, Counts(1.0, 1.0, 1.0))
    scores = score(denoiser, noisy, corruption.text)
    np.testing.assert_allclose(scores.document_nats(count).sum(), float(terms.text), rtol=1e-5)
    wrong = (noisy.noisy_tokens != noisy.tokens).numpy()
    assert scores.correct[wrong].sum() == float(terms.correct)
    assert wrong.sum() == float(terms.scored)
    np.testing.assert_allclose(scores.nats[wrong].sum(), float(terms.text_by_time[0].sum()), rtol=1e-5)
