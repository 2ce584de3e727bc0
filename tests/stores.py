"""Small pair stores for tests, made without any encoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mmldlm.data.files import file_entry
from mmldlm.data.format import Manifest
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


def relist(path: Path, *names: str, **changes: Any) -> None:
    """Make the manifest agree with changed files, as a stranger would; `changes` are other fields of the manifest."""
    manifest = Manifest.load(path)
    for name in names:
        manifest.files[name] = file_entry(path / name)
        for split in manifest.splits.values():
            for shard in split["shards"]:
                if shard["file"] == name:
                    shard.update(file_entry(path / name))  # type: ignore[typeddict-item]
                    del manifest.files[name]
    for field, value in changes.items():
        setattr(manifest, field, value)
    manifest.save(path)
