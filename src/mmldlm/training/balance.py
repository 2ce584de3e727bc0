"""Norms of the gradients of text and latent on what they share, measured now and then.

Two more passes over the step's documents, one for each loss. They run plainly, beside recorded graphs and DDP, and
touch no gradient that the step itself collects. Summed over micro-batches and ranks before the norm is taken, the
result is that of the step however it was cut up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmldlm.data.loader import StepBatch
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.weights import parameter_groups
from mmldlm.objective.balance import norms_of_shared
from mmldlm.objective.joint import Active

if TYPE_CHECKING:
    from mmldlm.training.step import Stepper

Found = list[Tensor | None]


def has_both(stepper: Stepper, batch: StepBatch) -> bool:
    """Whether both losses of a step reach something that they share; without that there is nothing to compare."""
    active, counts = stepper.active, batch.counts
    there = active.text and active.latent and float(counts.tokens) > 0 and float(counts.slots) > 0
    return there and bool(_trunk(stepper.denoiser))


def gradient_norms(stepper: Stepper, batch: StepBatch) -> Tensor:
    """(2,): of the gradients of the text loss and of the latent loss, up to a common scale; on the device."""
    return norms_of_shared(_norms(stepper, batch, "text"), _norms(stepper, batch, "latent"))


def _norms(stepper: Stepper, batch: StepBatch, part: str) -> Found:
    """For each parameter of the trunk, the norm of the step's gradient of one loss; None where it reaches none."""
    parameters = _trunk(stepper.denoiser)
    reached: list[bool] = []

    def flat() -> Tensor:
        gradients = _gradients(stepper, batch, part, parameters)
        reached[:] = [gradient is not None for gradient in gradients]
        return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])

    summed = flat() if stepper.replicas is None else stepper.replicas.summed(flat)
    sizes = [parameter.numel() for parameter, here in zip(parameters, reached, strict=True) if here]
    norms = iter(torch._foreach_norm(summed.split(sizes)))
    return [next(norms) if here else None for here in reached]


def _gradients(stepper: Stepper, batch: StepBatch, part: str, parameters: list[nn.Parameter]) -> Found:
    """Of this rank's documents. A common scale does not matter, so that of fp16 stays inside."""
    active = Active(text=part == "text", latent=part == "latent", length=False)
    total: Found = [None] * len(parameters)
    for parcel in batch.micro_batches:
        micro_batch = parcel.open()
        with stepper.runtime.autocast():
            terms = stepper.objective(stepper.denoiser, micro_batch.noisy, micro_batch.counts, active=active)
        loss = stepper.scaler.scale(getattr(terms, part))
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        total = [_sum(*pair) for pair in zip(total, found, strict=True)]
    return total


def _sum(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    return more if total is None else total if more is None else total + more


def _trunk(denoiser: Denoiser) -> list[nn.Parameter]:
    """All trained parameters but those of the heads, which have one loss each."""
    groups = [group for group in parameter_groups(denoiser) if not group.part.endswith("_head")]
    return [p for group in groups for p in group.parameters.values() if p.requires_grad]
