"""An encoder of your own, from text to decoded text: `python examples/own_encoder.py`, a minute on a CPU.

The encoder hashes character trigrams. It returns three vectors per text, one for each third of its words, so a latent
has the shape (3 slots, 32 channels). Any object with `encode(texts)` serves in the same way; on the command line it is
`mmldlm prepare TEXT --out STORE --encoder own_encoder:HashedTrigrams`.
"""

from __future__ import annotations

import itertools
import random
import sys
import zlib
from pathlib import Path

import numpy as np

import mmldlm

SLOTS, CHANNELS = 3, 32
STEPS = 120


class HashedTrigrams:
    """Counts of hashed character trigrams: pure Python and numpy, nothing to load."""

    def encode(self, texts: list[str]) -> np.ndarray:
        """Latents (texts, slots, channels)."""
        latents = np.zeros((len(texts), SLOTS, CHANNELS), np.float32)
        for latent, text in zip(latents, texts, strict=True):
            words = text.split()
            for place, word in enumerate(words):
                padded = f"^{word}$"
                for start in range(len(padded) - 2):
                    code = zlib.crc32(padded[start : start + 3].encode())
                    sign = 1 if code & 1 else -1
                    latent[SLOTS * place // len(words), (code >> 1) % CHANNELS] += sign
        return latents


def make_texts(count: int) -> list[str]:
    """Sentences of a small grammar, so that a minute is enough to learn them."""
    parts = (
        (
            "a red ship",
            "the old captain",
            "a small boat",
            "the young sailor",
            "a white gull",
            "the harbour master",
        ),
        ("waits", "sails", "rests", "turns", "watches", "sleeps"),
        ("near the island", "under the bridge", "beyond the reef", "at the northern pier", "in the calm bay"),
        ("before dawn", "at noon", "in the evening", "during the storm", "all night", "in early spring"),
    )
    sentences = [" ".join(words) for words in itertools.product(*parts)]
    return random.Random(0).sample(sentences, count)


def main(folder: Path, steps: int = STEPS) -> float:
    """Prepare, train, decode; returns the share of words that are right."""
    encoder = HashedTrigrams()
    store = mmldlm.prepare(make_texts(900), folder / "store", encoder=encoder, validation=0.1)
    print(store)
    settings = {
        "model.preset": "tiny",
        "optim.lr": 3e-3,
        "batch.tokens_per_step": 512,
        "train.steps": steps,
        "train.valid_every": steps,
        "train.trackers": [],
    }
    run = mmldlm.train("laptop", store=store, run=folder / "run", overrides=settings)
    model = mmldlm.load(run, encoder=encoder)
    texts = [str(text) for text in store.splits["validation"].texts]
    decoded = model.decode(model.embed(texts), steps=8)
    for text, again in list(zip(texts, decoded, strict=True))[:5]:
        print(f"  {text}\n  -> {again}")
    right = [
        word in str(again).split()
        for text, again in zip(texts, decoded, strict=True)
        for word in text.split()
    ]
    print(f"{100 * np.mean(right):.0f} % of the words of {len(texts)} held-out texts are decoded")
    return float(np.mean(right))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "saved/own-encoder"))
