"""Held-out loss inside the training loop: the training objective itself, with noise that never changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from mmldlm.config import Config
from mmldlm.corruption.joint import Corruption
from mmldlm.corruption.times import sees_latents, without_schedule
from mmldlm.data.loader import make_batch
from mmldlm.data.packing import Order, StepShape, document_keys, pack
from mmldlm.data.store import PairStore, Split
from mmldlm.model.denoiser import Denoiser
from mmldlm.objective.joint import LossTerms, Objective, add_terms
from mmldlm.runtime import Runtime
from mmldlm.types import Counts, NoisyBatch, PackedBatch, to_device

SEED = 0
"""Of the documents and their noise."""


class RunParts(Protocol):
    """What validation needs of a run; the set-up of a training run has it all."""

    @property
    def config(self) -> Config: ...
    @property
    def runtime(self) -> Runtime: ...
    @property
    def store(self) -> PairStore: ...
    @property
    def valid_split(self) -> Split: ...
    @property
    def shape(self) -> StepShape: ...
    @property
    def corruption(self) -> Corruption: ...
    @property
    def objective(self) -> Objective: ...


def make_validation(run: RunParts) -> Callable[[Denoiser], dict[str, float]]:
    """What scores a denoiser on train.valid_documents of the split, with noise that never changes.

    Documents, times and noise are the same for every `train.seed`, so that runs of several seeds can be compared.
    The modes are those that hold after all stages.
    """
    config, split, shape = run.config, run.valid_split, run.shape
    corruption = replace(
        run.corruption, config=without_schedule(config.corruption), seed=SEED, derived_share=0.0
    )
    order = Order(len(split), SEED)
    positions = np.arange(min(len(split), config.train.valid_documents))
    indices = order.documents(positions)
    batches = []
    for part in pack(np.asarray(split.lengths[indices], dtype=np.int64), shape):
        documents = split.read(indices[part])
        keys = document_keys(SEED, order.epochs(positions[part]), documents.ids)
        latents = run.store.normalizer.normalize(documents.latents)
        batch = make_batch(documents, latents, positions[part], keys, shape.caps, config.speed.layout)
        batches.append(corruption.corrupt(batch))
    return partial(
        validation_loss, corruption=corruption, objective=run.objective, batches=batches, device=run.runtime.device,
        autocast=run.runtime.autocast,
    )  # fmt: skip


def validation_loss(
    denoiser: Denoiser,
    corruption: Corruption,
    objective: Objective,
    batches: Iterable[PackedBatch | NoisyBatch],
    device: torch.device,
    autocast: Callable[[], AbstractContextManager[object]],
) -> dict[str, float]:
    """Losses over all batches together, as the log names them; a clean batch is corrupted by its own keys."""
    noisy = [corruption.corrupt(batch) if isinstance(batch, PackedBatch) else batch for batch in batches]
    counts = Counts.of(*noisy)
    compares = objective.active.text and sees_latents(corruption.config)
    was_training = denoiser.training
    denoiser.eval()
    total: LossTerms | None = None
    shuffled: LossTerms | None = None
    spread = Spread()
    watching = denoiser.register_forward_hook(
        lambda module, inputs, output: spread.see(output.latent_prediction)
    )
    try:
        with torch.no_grad(), autocast():
            for batch in noisy:
                moved = to_device(batch, device)
                total = add_terms(total, objective(denoiser, moved, counts))
                spread.keep(moved.latent_target > 0)
            for batch in with_wrong_latents(noisy, corruption) if compares else []:
                shuffled = add_terms(shuffled, objective(denoiser, to_device(batch, device), counts))
    finally:
        watching.remove()
        denoiser.train(was_training)
    assert total is not None, "validation needs at least one batch"
    parts = {
        "valid_loss": total.loss,
        "valid_text_loss": total.text,
        "valid_latent_loss": total.latent,
        "valid_length_loss": total.length,
        "valid_text_accuracy": total.correct / total.scored.clamp(min=1.0),
    }
    if shuffled is not None:
        parts["valid_text_loss_shuffled"] = shuffled.text
    if objective.active.latent and (value := spread.deviation()) is not None:
        parts["valid_latent_prediction_std"] = value
    return {name: float(value) for name, value in parts.items()}


def with_wrong_latents(batches: list[NoisyBatch], corruption: Corruption) -> list[NoisyBatch]:
    """Every document with the latent of the one before it, under its own noise and time."""
    real = [batch.layout.lengths > 0 for batch in batches]
    rolled = torch.cat([batch.latents[chosen] for batch, chosen in zip(batches, real, strict=True)]).roll(
        1, dims=0
    )
    swapped = []
    for batch, chosen, wrong in zip(batches, real, rolled.split([int(r.sum()) for r in real]), strict=True):
        latents = batch.latents.clone()
        latents[chosen] = wrong
        noisy = corruption.latent.corrupt(latents, batch.latent_noise, batch.latent_time)
        swapped.append(replace(batch, latents=latents, noisy_latents=noisy))
    return swapped


@dataclass
class Spread:
    """How much the predicted latents differ from document to document; near zero when they have collapsed."""

    _seen: Tensor | None = None
    _predictions: list[Tensor] = field(default_factory=list)

    def see(self, prediction: Tensor) -> None:
        """(N, S, C) of a pass; the last one of a batch counts."""
        self._seen = prediction

    def keep(self, chosen: Tensor) -> None:
        """Count what was seen last of these documents (N,), whose latent is predicted."""
        assert self._seen is not None, "a pass comes first"
        self._predictions.append(self._seen[chosen].float())

    def deviation(self) -> Tensor | None:
        """Mean over slots and channels of the deviation over documents; None for fewer than two."""
        predictions = torch.cat(self._predictions) if self._predictions else torch.empty(0)
        return predictions.std(dim=0).mean() if len(predictions) > 1 else None
