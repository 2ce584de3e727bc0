"""What a sampler needs: the network as a function from a noisy pack to clean tokens and clean latents.

Everything stays on the network's device, and nothing here makes the host wait for it.
Shapes: N documents, T tokens, R rows of tokens, S latent slots, C latent channels, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.corruption.joint import Corruption
from mmldlm.errors import UserError
from mmldlm.layout import Layout
from mmldlm.model.denoiser import Denoiser
from mmldlm.types import to_device

LogitsOf = Callable[[Tensor], Tensor]
"""(R,) rows of tokens to their logits (R, V) in float32."""


@dataclass(frozen=True)
class Prediction:
    """What is expected to be under the noise; each part is computed when it is asked for."""

    logits: LogitsOf
    latents: Callable[[], Tensor]
    """(N, S, C) float32, clean."""


class Predictor(Protocol):
    """Anything that predicts clean from noisy: a trained network, or an oracle."""

    def predict(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> Prediction:
        """One pass."""
        ...


class ModelPredictor:
    """A denoiser as a predictor."""

    def __init__(
        self,
        denoiser: Denoiser,
        corruption: Corruption,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        self.denoiser, self.corruption, self.device, self.autocast = denoiser, corruption, device, autocast

    @classmethod
    def of(cls, model: LoadedModel) -> ModelPredictor:
        """A loaded model, in its precision."""
        parts = (model.denoiser, model.corruption, model.device)
        return cls(*parts) if model.precision == "fp32" else cls(*parts, model.autocast)

    @torch.no_grad()
    def predict(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
    ) -> Prediction:
        """One pass of the network; what is not on its device is copied there."""
        inputs = (noisy_tokens, noisy_latents, text_time, latent_time)
        tokens, noisy, time, at = (value.to(self.device) for value in inputs)
        if layout.document.device.type != self.device.type:
            layout = to_device(layout, self.device)
        with self.autocast():
            output = self.denoiser(tokens, noisy, time, at, layout)

        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            with self.autocast():
                return self.denoiser.token_logits(output.token_hidden[rows.to(self.device)])

        def latents() -> Tensor:
            process, raw = self.corruption.latent, output.latent_prediction.float()
            return process.to_clean(process.prediction(raw, noisy, at), noisy, at)

        return Prediction(logits, latents)


@dataclass
class Watch:
    """Whether the predictions of a chain were numbers; asked when it is done, since an answer waits for the device."""

    bad: list[Tensor] = field(default_factory=list)

    def see(self, values: Tensor) -> None:
        """Remember whether all of these are finite."""
        self.bad.append(values.isfinite().all().logical_not())

    def check(self) -> None:
        """Reject a model that predicted anything else."""
        if self.bad and bool(torch.stack(self.bad).any()):
            raise UserError(
                "the model predicts NaN or infinity, so nothing can be sampled from it; "
                "use an earlier checkpoint, and look at the losses of the run"
            )


def require_finite(values: Tensor) -> None:
    """Reject a model whose predictions are not numbers, at once."""
    watch = Watch()
    watch.see(values)
    watch.check()
