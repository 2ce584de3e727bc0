"""What a sampler needs: the network as a function from a noisy pack to clean tokens and clean latents.

Samplers keep their documents on the host and do not know devices, number types or prediction types.
Shapes: N documents, T tokens, R rows of tokens, S latent slots, C latent channels, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.corruption.joint import Corruption
from mmldlm.errors import UserError
from mmldlm.layout import Layout
from mmldlm.model.denoiser import Denoiser
from mmldlm.types import to_device


@dataclass(frozen=True)
class Prediction:
    """What is expected to be under the noise."""

    token_logits: Tensor
    """(T, V) float32 on the network's device; (R, V) where only some rows were requested."""
    latents: Tensor | Callable[[], Tensor]
    """The clean latents, or a function that computes them: steps of the text do not need to wait for the device."""

    @property
    def clean_latents(self) -> Tensor:
        """(N, S, C) float32 on the host."""
        return self.latents if isinstance(self.latents, Tensor) else self.latents()


class Predictor(Protocol):
    """Anything that predicts clean from noisy: a trained network, or an oracle. Inputs are on the host."""

    def predict(
        self,
        noisy_tokens: Tensor,
        noisy_latents: Tensor,
        text_time: Tensor,
        latent_time: Tensor,
        layout: Layout,
        rows: Tensor | None = None,
    ) -> Prediction:
        """Logits are computed for the given rows of tokens only; None: for all."""
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
        self._placed: tuple[Layout, Layout] | None = None
        """The last layout and its copy on the device: the steps of a chain share one."""

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
        rows: Tensor | None = None,
    ) -> Prediction:
        """One pass of the network."""
        inputs = [x.to(self.device) for x in (noisy_tokens, noisy_latents, text_time, latent_time)]
        with self.autocast():
            output = self.denoiser(*inputs, self._on_device(layout))
            hidden = output.token_hidden if rows is None else output.token_hidden[rows.to(self.device)]
            token_logits = self.denoiser.token_logits(hidden)

        def clean_latents() -> Tensor:
            process, raw = self.corruption.latent, output.latent_prediction.float().cpu()
            prediction = process.prediction(raw, noisy_latents, latent_time)
            return process.to_clean(prediction, noisy_latents, latent_time)

        return Prediction(token_logits.float(), clean_latents)

    def _on_device(self, layout: Layout) -> Layout:
        if self.device.type == "cpu":
            return layout
        if self._placed is None or self._placed[0] is not layout:
            self._placed = (layout, to_device(layout, self.device))
        return self._placed[1]


def require_finite(values: Tensor) -> None:
    """Reject a model whose predictions are not numbers."""
    if not values.isfinite().all():
        raise UserError(
            "the model predicts NaN or infinity, so nothing can be sampled from it; "
            "use an earlier checkpoint, and look at the losses of the run"
        )
