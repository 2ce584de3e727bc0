"""What a sampler asks for: the network as a function from a noisy pack to clean tokens and clean latents.

Samplers keep their documents on the host and know nothing of devices, number types or prediction types.
Shapes: N documents, T tokens, R rows of tokens, S latent slots, C latent channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.layout import Layout
from mmldlm.types import to_device


@dataclass(frozen=True)
class Prediction:
    """What is expected to be under the noise."""

    token_logits: Tensor
    """(T, V) float32 on the network's device; (R, V) where only some rows were asked for."""
    latents: Tensor | Callable[[], Tensor]
    """The clean latents, or how to get them: steps of the text do without, and without waiting for the device."""

    @property
    def clean_latents(self) -> Tensor:
        """(N, S, C) float32 on the host."""
        return self.latents if isinstance(self.latents, Tensor) else self.latents()


class Predictor(Protocol):
    """Anything that can tell clean from noisy: a trained network, or an oracle. Inputs are on the host."""

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

    def length_logits(self, noisy_latents: Tensor, latent_time: Tensor) -> Tensor:
        """(N, longest length) float32; index i means length i + 1."""
        ...


class ModelPredictor:
    """A trained model as a predictor."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._placed: tuple[Layout, Layout] | None = None
        """The layout asked about last, and its copy on the device: the steps of a chain share one."""

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
        device, denoiser = self.model.device, self.model.denoiser
        inputs = [x.to(device) for x in (noisy_tokens, noisy_latents, text_time, latent_time)]
        with self.model.autocast():
            output = denoiser(*inputs, self._on_device(layout))
            hidden = output.token_hidden if rows is None else output.token_hidden[rows.to(device)]
            token_logits = denoiser.token_logits(hidden)

        def clean_latents() -> Tensor:
            process, raw = self.model.corruption.latent, output.latent_prediction.float().cpu()
            prediction = process.prediction(raw, noisy_latents, latent_time)
            return process.to_clean(prediction, noisy_latents, latent_time)

        return Prediction(token_logits.float(), clean_latents)

    def _on_device(self, layout: Layout) -> Layout:
        if self._placed is None or self._placed[0] is not layout:
            self._placed = (layout, to_device(layout, self.model.device))
        return self._placed[1]

    @torch.no_grad()
    def length_logits(self, noisy_latents: Tensor, latent_time: Tensor) -> Tensor:
        """What the length head says; the caller has made sure that there is one."""
        head, device = self.model.denoiser.length_head, self.model.device
        assert head is not None
        return head(noisy_latents.to(device), latent_time.to(device)).float()
