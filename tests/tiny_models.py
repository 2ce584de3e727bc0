"""A small random model with a tokenizer, as an export on disk: it knows the words w0 to w19."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from mmldlm.checkpoint.export import Export, write_export
from mmldlm.config import Config, CorruptionConfig, DataConfig, ModelConfig, ModeWeights
from mmldlm.config.recipe import config_to_dict
from mmldlm.data.store import PairStore
from mmldlm.data.writer import StoreWriter
from mmldlm.model.denoiser import DataShape, Denoiser
from mmldlm.model.weights import init_weights

VOCAB_SIZE, NUM_CHANNELS, LONGEST = 20, 4, 9


class FakeEncoder:
    """Latents that depend on the text alone."""

    def __init__(self, num_slots: int = 1) -> None:
        self.num_slots = num_slots

    def encode(self, texts: list[str]) -> np.ndarray:
        sizes = np.array([[len(text) % 5, len(text) % 3, 1.0, -1.0] for text in texts], np.float32)
        return 3.0 + np.stack([sizes * (slot + 1) for slot in range(self.num_slots)], axis=1)


def make_store(path: Path, seed: int = 0, encoder_name: str = "synthetic", num_slots: int = 1) -> PairStore:
    """A pair store of random texts."""
    rng = np.random.default_rng(seed)
    writer = StoreWriter(
        path,
        vocab_size=VOCAB_SIZE,
        num_slots=num_slots,
        num_channels=NUM_CHANNELS,
        latent_dtype="float32",
        encoder={"name": encoder_name},
    )
    for split, count in (("train", 30), ("validation", 6)):
        tokens = [rng.integers(0, VOCAB_SIZE, length) for length in rng.integers(2, LONGEST + 1, count)]
        texts = [" ".join(f"w{token}" for token in text) for text in tokens]
        latents = 3.0 + rng.normal(size=(count, num_slots, NUM_CHANNELS))
        writer.add(split, tokens, latents.astype(np.float32), texts, rng.integers(0, 2**62, count))
    return writer.finish()


def make_run(
    path: Path,
    store: PairStore,
    *,
    length: str = "modelled",
    modes: ModeWeights | None = None,
    dropout: float = 0.0,
) -> Path:
    """A folder whose export holds an untrained network of one block."""
    num_slots = store.manifest.num_slots
    shape = ModelConfig(
        depth=1,
        width=16,
        latent_width=16,
        num_heads=2,
        head_width=8,
        mlp_ratio=2.0,
        time_width=8,
        length=length,
    )
    corruption = CorruptionConfig(
        mode_weights=modes or ModeWeights(l2t=1, t2l=1, joint=1), condition_dropout=dropout
    )
    config = Config(model=shape, data=DataConfig(store=str(store.path)), corruption=corruption)
    denoiser = Denoiser(shape, DataShape(VOCAB_SIZE, num_slots, NUM_CHANNELS, LONGEST))
    init_weights(denoiser, 0)
    with torch.no_grad():
        denoiser.token_head.weight.mul_(20.0)  # sure enough of its tokens for the latent to matter
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    path.mkdir(parents=True)
    tokenizer.save(str(path / "tokenizer.json"))
    data = {
        "vocab_size": VOCAB_SIZE,
        "num_slots": num_slots,
        "num_channels": NUM_CHANNELS,
        "max_length": LONGEST,
        "fingerprint": store.fingerprint,
        "normalizer": store.normalizer.to_json(),
        "encoder": {"name": "synthetic"},
        "step": 7,
    }
    weights = {name: tensor.detach() for name, tensor in denoiser.state_dict().items()}
    write_export(path / "export", Export(weights, config_to_dict(config), data, path / "tokenizer.json"))
    return path
