"""A training loop of your own on a pair store, from text to decoded text: half a minute on a CPU.

    python examples/own_loop.py

The loop is the whole trainer: documents, noise, loss, update. `Model.of` then makes its weights a model like any other.
"""

import itertools
import random
import tempfile
from pathlib import Path

import numpy as np
import torch

import mmldlm
from mmldlm.config import CorruptionConfig, ModelConfig, ModeWeights, ObjectiveConfig

SIZES, COLOURS = ["a small", "the old", "a wide", "the long"], ["red", "green", "blue", "white", "black"]
THINGS = ["boat", "house", "bridge", "river", "train", "garden"]
WORDS = " ".join([*SIZES, *COLOURS, *THINGS]).split()
DOCUMENTS = 32


def encode(texts: list[str]) -> np.ndarray:
    """Latents (texts, channels): which words a text has."""
    return np.array([[word in text.split() for word in WORDS] for text in texts], np.float32)


def main(folder: Path, num_steps: int = 300) -> tuple[list[float], mmldlm.Model]:
    """Train; returns the loss of each step, and the model."""
    texts = [" ".join(words) for words in itertools.product(SIZES, COLOURS, THINGS)]
    random.Random(0).shuffle(texts)
    store = mmldlm.prepare(texts, folder / "store", encoder=encode, validation=0.1)
    split, rng = store.splits["train"], np.random.default_rng(0)

    denoiser = mmldlm.Denoiser(ModelConfig(preset="tiny", depth=2, width=64, latent_width=64), store.shape)
    modes = CorruptionConfig(mode_weights=ModeWeights(l2t=1, t2l=1, joint=0))
    corruption = mmldlm.Corruption(modes, vocab_size=store.shape.vocab_size)
    objective = mmldlm.Objective(ObjectiveConfig(), corruption)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(num_steps):
        batch = split.batch(rng.integers(0, len(split), DOCUMENTS), first=step * DOCUMENTS)
        terms = objective(denoiser, corruption.corrupt(batch))
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        losses.append(terms.loss.detach())
        if step % 50 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}  text {terms.text:.3f}  latent {terms.latent:.3f}")

    model = mmldlm.Model.of(denoiser, store, corruption, step=num_steps, encoder=encode)
    held_out = store.splits["validation"].texts
    for text, decoded in zip(held_out, model.decode(model.embed(held_out)), strict=True):
        print(f"{text}  ->  {decoded}")
    return torch.stack(losses).tolist(), model


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(Path(folder))
