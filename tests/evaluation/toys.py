"""Toy worlds whose answers are known: short texts of two kinds, and a denoiser that knows their distribution.

Shapes: Q possible texts, L tokens each, V vocabulary, T tokens of a pack, N documents of a pack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import Config, CorruptionConfig
from mmldlm.corruption.joint import Corruption, FlowLatent
from mmldlm.data.store import Documents
from mmldlm.latents import Normalizer
from mmldlm.layout import Layout
from mmldlm.model.denoiser import DataShape
from mmldlm.types import DenoiserOutput

VOCAB, LENGTH = 3, 3
TEXTS = np.array(list(itertools.product(range(VOCAB), repeat=LENGTH)))
"""(Q, L) every text."""
MAX_LENGTH = 5


def joint_distribution(seed: int = 0) -> np.ndarray:
    """(2, Q) probability of kind and text; tokens depend on each other and on the kind."""
    weights = np.exp(1.5 * np.random.default_rng(seed).normal(size=(2, len(TEXTS))))
    return weights / weights.sum()


class Oracle:
    """The exact denoiser: reads the kind from the sign of the latent, unless the latent is pure noise."""

    length_head = "modelled"

    def __init__(self, joint: np.ndarray, *, blind: bool = False) -> None:
        self.joint, self.blind = torch.from_numpy(joint), blind
        self.shape = DataShape(VOCAB, 1, 2, MAX_LENGTH)
        self.texts = torch.from_numpy(TEXTS)

    def __call__(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        kind = (noisy_latents[:, 0, 0] > 0).long()
        prior = self.joint[kind]
        ignored = torch.ones_like(latent_time, dtype=torch.bool) if self.blind else latent_time == 1
        prior[ignored] = self.joint.sum(0)
        seen = noisy_tokens.view(-1, LENGTH)
        fits = ((seen[:, None] == self.texts) | (seen[:, None] == VOCAB)).all(-1)
        posterior = prior * fits
        posterior = posterior / posterior.sum(1, keepdim=True)
        one_hot = torch.nn.functional.one_hot(self.texts, VOCAB).double()
        marginal = torch.einsum("nq,qlv->nlv", posterior, one_hot).reshape(-1, VOCAB)
        lengths = torch.full((len(seen), MAX_LENGTH), -1.0)
        lengths[:, LENGTH - 1] = 1.0
        return DenoiserOutput(marginal.log(), noisy_latents, lengths)

    @staticmethod
    def token_logits(hidden: Tensor) -> Tensor:
        return hidden


class Priced:
    """Its cost of a token is known: that of its place, times a function of the share of masked tokens."""

    length_head = None

    def __init__(self, costs: np.ndarray, factor: Callable[[Tensor], Tensor]) -> None:
        self.costs, self.factor = torch.from_numpy(costs), factor
        self.shape = DataShape(VOCAB, 1, 2, len(costs))

    def __call__(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        share = (noisy_tokens.view(-1, len(self.costs)) == VOCAB).double().mean(1, keepdim=True)
        right = (-self.costs * self.factor(share)).exp().reshape(-1, 1)
        logits = torch.cat([right, (1 - right) / 2, (1 - right) / 2], dim=1).log()
        return DenoiserOutput(logits, noisy_latents, None)

    @staticmethod
    def token_logits(hidden: Tensor) -> Tensor:
        return hidden

    def cost(self) -> float:
        """Of a text of tokens 0, in any order of its places."""
        shares = torch.arange(1, len(self.costs) + 1) / len(self.costs)
        return float(self.costs.mean() * self.factor(shares).sum())


def oracle_model(joint: np.ndarray, *, schedule: str = "linear", blind: bool = False) -> LoadedModel:
    """The oracle in the place of a trained network."""
    corruption = Corruption(
        CorruptionConfig(text_schedule=schedule), vocab_size=VOCAB, seed=0, row_multiple=8
    )
    config = Config(corruption=corruption.config)
    return LoadedModel(
        denoiser=cast(Any, Oracle(joint, blind=blind)),
        config=config,
        corruption=corruption,
        device=torch.device("cpu"),
        fingerprint="toy",
        normalizer=Normalizer(np.zeros(2, np.float32), np.ones(2, np.float32)),
        encoder=None,
        tokenizer_path=None,
    )


def draw_documents(joint: np.ndarray, count: int, seed: int = 0) -> tuple[Documents, np.ndarray]:
    """Documents of the toy world, and which of the (kind, text) pairs each is."""
    rng = np.random.default_rng(seed)
    drawn = rng.choice(joint.size, size=count, p=joint.reshape(-1))
    kind, text = np.divmod(drawn, len(TEXTS))
    latents = np.stack([2.0 * kind - 1.0, rng.normal(size=count)], axis=1)[:, None].astype(np.float32)
    documents = Documents(TEXTS[text].reshape(-1), np.full(count, LENGTH), latents, rng.permutation(count))
    return documents, drawn


class GaussianOracle:
    """The exact denoiser of a world where latents are normal around a mean that the first token tells.

    It says what it knows in the words of the run's prediction type.
    """

    length_head = None

    def __init__(self, means: np.ndarray, deviation: float, corruption: Corruption) -> None:
        self.means, self.deviation = torch.from_numpy(means), deviation
        self.process = corruption.latent
        self.shape = DataShape(VOCAB, 1, means.shape[1], MAX_LENGTH)

    def __call__(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        noisy, time = noisy_latents[:, 0].double(), latent_time.double()
        signal, sigma = (
            self.process.schedule.signal(time)[:, None],
            self.process.schedule.noise(time)[:, None],
        )
        variance = signal**2 * self.deviation**2 + sigma**2
        distance = ((noisy[:, None] - signal[:, None] * self.means) ** 2).sum(-1) / variance
        belief = (-0.5 * distance).softmax(1)
        kind = noisy_tokens.view(-1, LENGTH)[:, 0]
        seen = torch.nn.functional.one_hot(kind.clamp(max=len(self.means) - 1), len(self.means)).double()
        belief = torch.where((text_time == 0)[:, None], seen, belief)
        shrink = signal * self.deviation**2 / variance
        each = self.means + shrink[:, None] * (noisy[:, None] - signal[:, None] * self.means)
        clean = (belief[..., None] * each).sum(1)
        noise = (noisy - signal * clean) / sigma
        flow = isinstance(self.process.schedule, FlowLatent)
        velocity = noise - clean if flow else signal * noise - sigma * clean
        said = clean if self.process.prediction_type == "clean" else velocity
        return DenoiserOutput(torch.zeros(len(noisy_tokens), VOCAB), said[:, None].float(), None)

    @staticmethod
    def token_logits(hidden: Tensor) -> Tensor:
        return hidden


def gaussian_model(
    means: np.ndarray, deviation: float, *, prediction_type: str, schedule: str
) -> LoadedModel:
    """The Gaussian oracle in the place of a trained network."""
    config = CorruptionConfig(prediction_type=prediction_type, latent_schedule=schedule)
    model = oracle_model(joint_distribution())
    model.corruption = Corruption(config, vocab_size=VOCAB, seed=0, row_multiple=8)
    model.config = Config(corruption=config)
    model.denoiser = cast(Any, GaussianOracle(means, deviation, model.corruption))
    return model


def draw_gaussian_documents(means: np.ndarray, deviation: float, count: int, seed: int = 0) -> Documents:
    """Documents of the Gaussian world; all kinds are equally likely."""
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, len(means), count)
    latents = means[kind] + deviation * rng.normal(size=(count, means.shape[1]))
    tokens = np.column_stack([kind, np.zeros((count, LENGTH - 1), dtype=np.int64)])
    return Documents(
        tokens.reshape(-1),
        np.full(count, LENGTH),
        latents[:, None].astype(np.float32),
        rng.permutation(count),
    )
