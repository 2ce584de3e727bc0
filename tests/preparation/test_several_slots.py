"""Several vectors per text, from an encoder of the user's to the evaluation."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

import mmldlm

WORDS = (
    "the",
    "coil",
    "of",
    "rope",
    "open",
    "sea",
    "harbour",
    "ship",
    "sails",
    "north",
    "wind",
    "calm",
    "night",
)
SLOTS, CHANNELS = 3, 12


class Thirds:
    """One vector for each third of the words."""

    def encode(self, texts: list[str]) -> np.ndarray:
        latents = np.zeros((len(texts), SLOTS, CHANNELS), np.float32)
        for latent, text in zip(latents, texts, strict=True):
            words = text.split()
            for place, word in enumerate(words):
                latent[SLOTS * place // len(words), zlib.crc32(word.encode()) % CHANNELS] += 1
        return latents


def test_prepare_train_decode_evaluate(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, rng.integers(4, 10))) for _ in range(160)]
    store = mmldlm.prepare(texts, tmp_path / "store", encoder=Thirds(), validation=0.2)
    assert (store.manifest.num_slots, store.manifest.num_channels) == (SLOTS, CHANNELS)
    settings = {
        "model.preset": "tiny",
        "model.depth": 1,
        "batch.tokens_per_step": 256,
        "corruption.mode_weights": {"l2t": 1, "t2l": 1, "joint": 1},
        "train.steps": 6,
        "train.valid_every": 3,
        "train.trackers": [],
        "train.device": "cpu",
    }
    run = mmldlm.train("laptop", store=store, run=tmp_path / "run", overrides=settings)
    model = mmldlm.load(run, "cpu", encoder=Thirds())
    held_out = [str(text) for text in store.splits["validation"].texts]
    latents = model.embed(held_out)
    assert np.allclose(latents, store.splits["validation"].latents, atol=1e-2)
    assert model.encode(held_out[:2]).shape == (2, SLOTS, CHANNELS)
    assert len(model.decode(latents[:2], steps=2, lengths=4)) == 2
    assert model.generate(2).latents.shape == (2, SLOTS, CHANNELS)
    result = mmldlm.evaluate(
        run, num=24, num_decoded=8, num_generated=4, steps=[1, 2], encoder=Thirds(), device="cpu"
    )
    assert result.inversion is not None
    assert 0 <= result.inversion.tokens_right.value <= 1
