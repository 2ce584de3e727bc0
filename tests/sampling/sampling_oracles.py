"""Models whose right answers are known: exact denoisers of small distributions, and a small random network.

An oracle stands where the network stands in a `LoadedModel` and speaks the run's prediction type, so that a
test with it goes through everything a user's call goes through.
Shapes: N documents, T tokens, C channels, K kinds of document, Q possible texts, V vocabulary.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.config import Config, CorruptionConfig, ModelConfig, ModeWeights
from mmldlm.corruption.joint import Corruption
from mmldlm.latents import Normalizer
from mmldlm.layout import Layout
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.weights import init_weights
from mmldlm.sampling.options import SamplingOptions
from mmldlm.types import DenoiserOutput

MASK_SAMPLERS = ("ancestral", "block", "confidence", "first_hitting", "margin")
"""Text samplers for models whose noise is masks alone."""
NUM_LETTERS, TEXT_LENGTH = 3, 4
TEXTS = np.array(list(itertools.product(range(NUM_LETTERS), repeat=TEXT_LENGTH)))
"""(Q, 4) every text of four letters."""


def drawing(**changes: Any) -> SamplingOptions:
    """Options that draw from what the model predicts, and so reproduce its distribution."""
    return SamplingOptions(**{"temperature": 1.0, **changes})


def toy_distribution(num_kinds: int, seed: int = 0) -> np.ndarray:
    """(K, Q) joint probability of kind and text; the letters of a text depend on each other strongly."""
    rng = np.random.default_rng(seed)
    weight = np.exp(1.2 * rng.normal(size=(num_kinds, len(TEXTS))))
    agree = (TEXTS[:, 0] == TEXTS[:, 2]) + 2.0 * (TEXTS[:, 1] == TEXTS[:, 3])
    weight *= np.exp(0.5 * agree)
    return weight / weight.sum()


PLACES = (NUM_LETTERS + 1) ** torch.arange(TEXT_LENGTH - 1, -1, -1)
"""A partly masked text is a number in base four, its state: three letters and the mask."""


def text_tables(joint: Tensor) -> tuple[Tensor, Tensor]:
    """For each state: (256, K) the probability of kind and fitting texts, (256, K, 4, V) that of letters given both.

    Whatever the latent, text and kind enter the posterior through these alone, so they are summed once.
    """
    states = torch.from_numpy(np.array(list(itertools.product(range(NUM_LETTERS + 1), repeat=TEXT_LENGTH))))
    texts = torch.from_numpy(TEXTS)
    fits = ((states[:, None] == NUM_LETTERS) | (states[:, None] == texts)).all(-1).double()
    of_state = fits @ joint.T
    letters = torch.nn.functional.one_hot(texts, NUM_LETTERS).double()
    return of_state, torch.einsum("sq,kq,qlv->sklv", fits, joint, letters) / of_state[:, :, None, None]


class OracleDenoiser:
    """The exact posterior of (kind, text) given any noisy pair; latents of a kind are Gaussian, or a point."""

    def __init__(
        self,
        corruption: Corruption,
        joint: np.ndarray,
        centres: np.ndarray,
        spread: float = 0.0,
        length_logits: np.ndarray | None = None,
    ) -> None:
        self.corruption, self.spread = corruption, spread
        self.joint, self.centres = torch.from_numpy(joint), torch.from_numpy(centres).double()
        self.of_state, self.letters = text_tables(self.joint)
        self.shape = DataShape(NUM_LETTERS, 1, centres.shape[1], 16)
        logits = np.zeros(16) if length_logits is None else length_logits
        self.length_head = lambda latents, time: torch.from_numpy(logits).float().expand(len(latents), -1)
        self.calls: list[dict[str, Any]] = []

    def __call__(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> DenoiserOutput:
        self.calls.append(
            {
                "tokens": noisy_tokens,
                "latents": noisy_latents,
                "text_time": text_time,
                "latent_time": latent_time,
            }
        )
        signal, sigma = (level[:, 0].double() for level in self.corruption.latent.levels(latent_time))
        state = (noisy_tokens.view(-1, TEXT_LENGTH) * PLACES).sum(1)
        kind = self.kinds(state, noisy_latents[:, 0].double(), signal, sigma)
        marginals = (kind[:, :, None, None] * self.letters[state]).sum(1)
        clean = self.clean_given(kind, noisy_latents[:, 0].double(), signal, sigma)
        return DenoiserOutput(
            token_hidden=marginals.log().view(-1, NUM_LETTERS).float(),
            latent_prediction=self.in_type(clean[:, None], noisy_latents.double(), latent_time).float(),
            length_logits=None,
        )

    def token_logits(self, hidden: Tensor) -> Tensor:
        return hidden

    def kinds(self, state: Tensor, latents: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        """(N, K) how probable each kind is, given both."""
        variance = ((signal * self.spread) ** 2 + sigma**2).clamp(min=1e-8)[:, None]
        distance = (latents[:, None] - signal[:, None] * self.centres[None]) ** 2
        log_latent = (-0.5 * distance / variance).sum(-1)
        return (log_latent + self.of_state[state].log()).softmax(-1)

    def clean_given(self, kind: Tensor, latents: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
        """(N, C) mean of the latent: of each kind's Gaussian, weighted by the kinds' probabilities."""
        gain = signal * self.spread**2 / ((signal * self.spread) ** 2 + sigma**2).clamp(min=1e-12)
        residual = latents[:, None] - signal[:, None] * self.centres[None]
        return (kind[:, :, None] * (self.centres[None] + gain[:, None] * residual)).sum(1)

    def in_type(self, clean: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """The clean latent in the words of the prediction type, by this file's own formulas."""
        kind = self.corruption.config.prediction_type
        if kind == "clean":
            return clean
        signal, sigma = (level.double() for level in self.corruption.latent.levels(time))
        noise = (noisy - signal * clean) / sigma.clamp(min=1e-12)
        # the velocity; a network of noise corrects the noisy latent by it (see LatentProcess.prediction)
        if self.corruption.config.latent_schedule == "flow":
            return noise - clean
        return signal * noise - sigma * clean


def oracle_model(
    joint: np.ndarray,
    centres: np.ndarray,
    *,
    spread: float = 0.0,
    length_logits: np.ndarray | None = None,
    **settings: Any,
) -> LoadedModel:
    """The exact model of a distribution; `settings` are those of the corruption."""
    config = Config(corruption=CorruptionConfig(**settings))
    corruption = Corruption(config.corruption, vocab_size=NUM_LETTERS, seed=0)
    denoiser = OracleDenoiser(corruption, joint, centres, spread, length_logits)
    return _loaded(cast(Denoiser, denoiser), config, corruption)


def random_model(
    *,
    length: str = "modelled",
    modes: ModeWeights | None = None,
    **settings: Any,
) -> LoadedModel:
    """A small network with random weights, all of them at work; 50 words, 2 slots of 3 channels."""
    corruption_config = CorruptionConfig(mode_weights=modes or ModeWeights(), **settings)
    shape = ModelConfig(
        depth=2,
        width=32,
        latent_width=24,
        num_heads=2,
        head_width=8,
        mlp_ratio=2.0,
        time_width=16,
        length=length,
    )
    config = Config(model=shape, corruption=corruption_config)
    denoiser = Denoiser(shape, DataShape(50, 2, 3, 12))
    init_weights(denoiser, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))
        denoiser.token_head.weight.mul_(3.0)
    return _loaded(
        denoiser.eval().requires_grad_(False), config, Corruption(corruption_config, vocab_size=50, seed=0)
    )


def _loaded(denoiser: Denoiser, config: Config, corruption: Corruption) -> LoadedModel:
    return LoadedModel(
        denoiser=denoiser,
        config=config,
        corruption=corruption,
        device=torch.device("cpu"),
        fingerprint="toy",
        normalizer=Normalizer(np.zeros(1, np.float32), np.ones(1, np.float32)),
        encoder=None,
        tokenizer_path=None,
    )


def chi_square(texts: list[np.ndarray], probability: np.ndarray) -> float:
    """Distance of drawn texts from a distribution over TEXTS, in standard deviations of what chance gives."""
    index = np.stack(texts) @ (NUM_LETTERS ** np.arange(TEXT_LENGTH - 1, -1, -1))
    expected = probability * len(texts)
    statistic = ((np.bincount(index, minlength=len(TEXTS)) - expected) ** 2 / expected).sum()
    freedom = len(TEXTS) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def spy(model: LoadedModel) -> list[SimpleNamespace]:
    """Record what the network of a model is asked; returns the growing record."""
    record: list[SimpleNamespace] = []
    inner_call, inner_head = model.denoiser.forward, model.denoiser.token_logits

    def forward(
        tokens: Tensor, latents: Tensor, text_time: Tensor, latent_time: Tensor, layout: Layout
    ) -> DenoiserOutput:
        record.append(
            SimpleNamespace(
                tokens=tokens,
                latents=latents,
                text_time=text_time,
                latent_time=latent_time,
                layout=layout,
                rows=0,
            )
        )
        return inner_call(tokens, latents, text_time, latent_time, layout)

    def token_logits(hidden: Tensor) -> Tensor:
        record[-1].rows = len(hidden)
        return inner_head(hidden)

    model.denoiser.forward, model.denoiser.token_logits = forward, token_logits  # type: ignore[method-assign]
    return record
