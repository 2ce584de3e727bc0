"""Small pair stores for tests, made without any encoder."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mmldlm.data.store import PairStore
from mmldlm.data.writer import StoreWriter


def write_store(
    path: str | Path,
    *,
    num_train: int = 200,
    num_valid: int = 40,
    vocab_size: int = 97,
    num_slots: int = 1,
    num_channels: int = 8,
    min_length: int = 3,
    max_length: int = 24,
    seed: int = 0,
    shard_documents: int = 64,
    latent_dtype: str = "float32",
    encoder: str = "synthetic",
) -> PairStore:
    """Random documents whose latents depend linearly on their tokens, so that there is something to learn."""
    rng = np.random.default_rng(seed)
    table = rng.normal(size=(vocab_size, num_slots, num_channels)).astype(np.float32)
    writer = StoreWriter(
        path,
        vocab_size=vocab_size,
        num_slots=num_slots,
        num_channels=num_channels,
        latent_dtype=latent_dtype,
        encoder={"name": encoder, "prompt": "", "normalize": False, "dimension": num_channels},
        shard_documents=shard_documents,
    )
    for split, count in (("train", num_train), ("validation", num_valid)):
        lengths = rng.integers(min_length, max_length + 1, count)
        tokens = [rng.integers(0, vocab_size, length) for length in lengths]
        if count:
            latents = np.stack([table[row].mean(axis=0) for row in tokens]) + 0.5
            texts = [" ".join(f"w{token}" for token in row) for row in tokens]
            writer.add(split, tokens, latents, texts, rng.integers(0, 2**63 - 1, count))
    return writer.finish()
