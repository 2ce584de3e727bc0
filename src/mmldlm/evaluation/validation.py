"""Held-out loss inside the training loop: the training objective itself, with noise that never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch

from mmldlm.corruption.joint import Corruption
from mmldlm.model.denoiser import Denoiser
from mmldlm.objective.joint import LossTerms, Objective, add_terms
from mmldlm.types import Batch, Counts, NoisyBatch, to_device


def validation_loss(
    denoiser: Denoiser,
    corruption: Corruption,
    objective: Objective,
    batches: Iterable[Batch | NoisyBatch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Losses over all batches together, as the log names them; a clean batch is corrupted by its own keys."""
    noisy = [corruption.corrupt(batch) if isinstance(batch, Batch) else batch for batch in batches]
    counts = _count(noisy)
    was_training = denoiser.training
    denoiser.eval()
    total: LossTerms | None = None
    try:
        with torch.no_grad(), autocast():
            for batch in noisy:
                total = add_terms(total, objective(denoiser, to_device(batch, device), counts))
    finally:
        denoiser.train(was_training)
    assert total is not None, "validation needs at least one batch"
    parts = {
        "valid_loss": total.loss,
        "valid_text_loss": total.text,
        "valid_latent_loss": total.latent,
        "valid_length_loss": total.length,
        "valid_text_accuracy": total.correct / total.scored.clamp(min=1.0),
    }
    return {name: float(value) for name, value in parts.items()}


def _count(batches: list[NoisyBatch]) -> Counts:
    """What the sums over all batches are divided by."""
    return Counts(
        tokens=sum(float((batch.length_target * batch.layout.lengths).sum()) for batch in batches),
        slots=sum(float(batch.latent_target.sum()) * batch.layout.num_slots for batch in batches),
        documents=sum(float(batch.length_target.sum()) for batch in batches),
    )
