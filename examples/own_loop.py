"""A training loop of one's own on the parts of the library: no trainer, no pair store, a few seconds on a CPU.

    python examples/own_loop.py

The texts are runs of a repeated token and the latent tells which token it is, so both directions can be learned.
"""

import numpy as np
import torch

from mmldlm import Corruption, Denoiser, Objective, PackedBatch
from mmldlm.config import CorruptionConfig, ModelConfig, ModeWeights, ObjectiveConfig
from mmldlm.model.denoiser import DataShape

VOCAB, CHANNELS, LONGEST, DOCUMENTS = 50, 8, 12, 32


def main(num_steps: int = 150) -> list[float]:
    """Train; returns the loss of each step."""
    rng, directions = np.random.default_rng(0), np.random.default_rng(1).normal(size=(VOCAB, CHANNELS))
    shape = DataShape(vocab_size=VOCAB, num_slots=1, num_channels=CHANNELS, max_length=LONGEST)
    denoiser = Denoiser(ModelConfig(preset="tiny", depth=2, width=64, latent_width=64), shape)
    corruption = Corruption(
        CorruptionConfig(mode_weights=ModeWeights(l2t=1, t2l=1, joint=0)), vocab_size=VOCAB
    )
    objective = Objective(ObjectiveConfig(), corruption)
    optimizer = torch.optim.AdamW(denoiser.parameters(), lr=2e-3)
    losses = []
    for step in range(num_steps):
        words = rng.integers(0, VOCAB, DOCUMENTS)
        texts = [np.full(rng.integers(2, LONGEST + 1), word) for word in words]
        batch = PackedBatch.of(texts, directions[words], first=step * DOCUMENTS)
        terms = objective(denoiser, corruption.corrupt(batch))
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        losses.append(terms.loss.item())
        if step % 25 == 0:
            print(f"step {step:4d}  loss {losses[-1]:.3f}  text {terms.text:.3f}  latent {terms.latent:.3f}")
    return losses


if __name__ == "__main__":
    main()
