"""One optimizer update: forward and backward over the micro-batches, clip, step, average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmldlm.config import OptimConfig
from mmldlm.data.loader import StepBatch
from mmldlm.model.denoiser import Denoiser
from mmldlm.objective.joint import LossTerms, Objective, add_terms
from mmldlm.runtime import Runtime
from mmldlm.train.ema import Ema
from mmldlm.train.optim import set_lr
from mmldlm.types import to_device


@dataclass
class StepResult:
    """What a step did; tensors stay on the device until somebody logs them."""

    terms: LossTerms
    grad_norm: Tensor
    skipped: Tensor
    """1 where the gradient was not finite and nothing was updated."""


@dataclass
class Stepper:
    """Everything one update touches."""

    denoiser: Denoiser
    objective: Objective
    optimizer: torch.optim.Optimizer
    ema: Ema | None
    scaler: torch.amp.GradScaler
    runtime: Runtime
    config: OptimConfig

    def __call__(self, batch: StepBatch, lr: float, step: int) -> StepResult:
        """Train on one step's documents. The loss of the step is the sum over its micro-batches."""
        set_lr(self.optimizer, lr)
        terms: LossTerms | None = None
        for micro_batch in batch.micro_batches:
            moved = to_device(micro_batch, self.runtime.device)
            with self.runtime.autocast():
                part = self.objective(self.denoiser, moved, batch.counts)
            self.scaler.scale(part.loss).backward()
            terms = add_terms(terms, part)
        assert terms is not None
        grad_norm, skipped = self._update()
        if self.ema is not None:
            self.ema.update(step + 1)
        return StepResult(terms, grad_norm, skipped)

    def _update(self) -> tuple[Tensor, Tensor]:
        """Clip and step. A gradient that is not finite changes nothing: not the weights, not the moments."""
        self.scaler.unscale_(self.optimizer)
        grad_norm = self._clip()
        skipped = (~torch.isfinite(grad_norm)).float()
        if self.scaler.is_enabled():
            self.scaler.step(self.optimizer)
            self.scaler.update()
        elif self.optimizer.defaults.get("fused"):
            self.optimizer.found_inf = skipped  # type: ignore[attr-defined]  # the kernel looks at it: no wait for the device
            self.optimizer.step()
        elif not skipped.item():
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return grad_norm, skipped

    def _clip(self) -> Tensor:
        grads = [
            p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        norm = torch.nn.utils.get_total_norm(grads)
        if self.config.clip_norm > 0:
            torch._foreach_mul_(grads, (self.config.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
