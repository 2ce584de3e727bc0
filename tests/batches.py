"""Random documents and small denoisers for tests."""

from __future__ import annotations

import numpy as np
import torch

from mmldlm import randomness
from mmldlm.config import CorruptionConfig, ModelConfig
from mmldlm.corruption.joint import Corruption
from mmldlm.data.loader import make_batch
from mmldlm.data.store import Documents
from mmldlm.layout import Caps
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.weights import init_weights
from mmldlm.types import PackedBatch

SHAPE = DataShape(vocab_size=97, num_slots=2, num_channels=5, max_length=12)
LENGTHS = (3, 12, 1, 7, 5, 9)


def small_config(**changes: object) -> ModelConfig:
    """A model that runs in milliseconds and uses unequal widths everywhere."""
    sizes = {"depth": 2, "width": 32, "latent_width": 16, "num_heads": 2, "head_width": 8, "time_width": 16}
    sizes |= {"mlp_ratio": 2.0}
    return ModelConfig(preset="tiny", **(sizes | changes))


def small_denoiser(seed: int = 0, shape: DataShape = SHAPE, **changes: object) -> Denoiser:
    """Weights away from their special first values, so that every path matters."""
    denoiser = Denoiser(small_config(**changes), shape)
    init_weights(denoiser, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in denoiser.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return denoiser


def small_corruption(seed: int = 0, **changes: object) -> Corruption:
    """Mixed modes with dropped conditions."""
    return Corruption(CorruptionConfig(**changes), vocab_size=SHAPE.vocab_size, seed=seed)


def small_documents(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> Documents:
    """Random tokens and latents."""
    rng = np.random.default_rng(seed)
    return Documents(
        tokens=rng.integers(0, SHAPE.vocab_size, sum(lengths)),
        lengths=np.array(lengths, dtype=np.int64),
        latents=rng.normal(size=(len(lengths), SHAPE.num_slots, SHAPE.num_channels)).astype(np.float32),
        ids=rng.integers(0, 2**62, len(lengths)),
    )


def pick(documents: Documents, chosen: np.ndarray) -> Documents:
    """Some of the documents, in the order asked for."""
    pieces = np.split(documents.tokens, np.cumsum(documents.lengths)[:-1])
    tokens = np.concatenate([pieces[i] for i in chosen]) if len(chosen) else documents.tokens[:0]
    return Documents(tokens, documents.lengths[chosen], documents.latents[chosen], documents.ids[chosen])


def batch_of(
    documents: Documents, chosen: np.ndarray | None = None, caps: Caps | None = None, layout: str = "packed"
) -> PackedBatch:
    """A clean micro-batch of the chosen documents, each with its own key and position."""
    chosen = np.arange(len(documents.lengths)) if chosen is None else chosen
    part = pick(documents, chosen)
    keys = randomness.make_key(7, documents.ids[chosen])
    return make_batch(part, part.latents, chosen.astype(np.int64), keys, caps, layout)
