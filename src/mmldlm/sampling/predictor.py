"""What a sampler needs: the network as a function from a noisy pack to clean tokens and clean latents; and guidance.

Guided predictions follow the other modality more strongly (or less) than the network does by itself:

    guided = unconditional + guidance * (conditional - unconditional)

The unconditional prediction sees the other modality at time 1, as when training drops the condition: for text
that is pure latent noise, for latents a text of masks. With `Pack.against`, the text is compared with the prediction
for those latents instead. Guidance 1 is the network itself and costs one pass.

Everything stays on the network's device, and nothing here makes the host wait for it.
Shapes: N documents, T tokens, R rows of tokens, S latent slots, C latent channels, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from mmldlm.checkpoint.load import LoadedModel
from mmldlm.corruption.joint import Corruption
from mmldlm.layout import Layout, packed_layout
from mmldlm.model.denoiser import Denoiser
from mmldlm.model.frozen import FrozenDenoiser, frozen
from mmldlm.runtime import DTYPES
from mmldlm.sampling.pack import Pack, Watch, latent_noise, send_tensor
from mmldlm.sampling.recording import PassInputs, Recordings, rounded_layout
from mmldlm.types import to_device

LogitsOf = Callable[[Tensor], Tensor]
"""(R,) rows of tokens to their logits (R, V), in the type in which the network computes them."""
_RECORDINGS: WeakKeyDictionary[Denoiser, Recordings] = WeakKeyDictionary()


@dataclass(frozen=True)
class Logits:
    """`LogitsOf` that can also be computed some columns after the other."""

    whole: LogitsOf
    blocks: Callable[[Tensor], Iterator[Tensor]]
    """(R,) rows to blocks of their logits in float32."""

    def __call__(self, rows: Tensor) -> Tensor:
        return self.whole(rows)


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
        self.recordings: Recordings | None = None
        """Where passes are recorded; None: they are not."""
        self.frozen: FrozenDenoiser | None = None
        """The same network for a CPU."""

    @classmethod
    def of(cls, model: LoadedModel) -> ModelPredictor:
        """A loaded model, in its precision."""
        parts = (model.denoiser, model.corruption, model.device)
        predictor = cls(*parts) if model.precision == "fp32" else cls(*parts, model.autocast)
        if model.device.type == "cuda" and model.denoiser.kernels.attention in ("varlen", "by_length"):
            predictor.recordings = _RECORDINGS.setdefault(model.denoiser, Recordings())
        if model.device.type == "cpu":
            predictor.frozen = frozen(model.denoiser, DTYPES[model.precision])
        return predictor

    def arrange(self, lengths: np.ndarray, num_slots: int) -> Layout:
        """The layout of a pack, of a size that was recorded where possible."""
        if self.recordings is None:
            return packed_layout(lengths, num_slots, with_rows=self.frozen is None)
        return rounded_layout(lengths, num_slots)

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
        given = PassInputs(tokens, noisy, time, at)
        if self.frozen is not None and layout.num_tokens == int(layout.lengths.sum()):
            return self._predict_frozen(self.frozen, given, layout)
        if self.recordings is not None and layout.rows is None:
            hidden, prediction = self.recordings(self._run, given, layout)
        else:
            hidden, prediction = self._run(given, layout)

        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            chosen = hidden[rows.to(self.device)]
            with self.autocast():
                if self.device.type != "cuda":
                    return self.denoiser.token_logits(chosen)
                return self.denoiser.token_head(chosen)[:, : self.denoiser.shape.vocab_size]

        return Prediction(logits, lambda: self._clean(prediction[: len(noisy)], noisy, at))

    def _predict_frozen(self, network: FrozenDenoiser, inputs: PassInputs, layout: Layout) -> Prediction:
        hidden = network(inputs.tokens, inputs.latents, inputs.text_time, inputs.latent_time, layout)

        def blocks(rows: Tensor) -> Iterator[Tensor]:
            return network.logit_blocks(hidden.tokens(rows))

        def latents() -> Tensor:
            return self._clean(hidden.latents().view_as(inputs.latents), inputs.latents, inputs.latent_time)

        return Prediction(Logits(lambda rows: torch.cat(list(blocks(rows)), 1), blocks), latents)

    def _clean(self, raw: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """(N, S, C) the clean latents that the network's raw prediction stands for."""
        process = self.corruption.latent
        return process.to_clean(process.prediction(raw.float(), noisy, time), noisy, time)

    @torch.no_grad()
    def _run(self, inputs: PassInputs, layout: Layout) -> tuple[Tensor, Tensor]:
        with self.autocast():
            output = self.denoiser(
                inputs.tokens, inputs.latents, inputs.text_time, inputs.latent_time, layout
            )
        return output.token_hidden, output.latent_prediction


def require_finite(values: Tensor) -> None:
    """Reject a model whose predictions are not numbers, at once."""
    watch = Watch()
    watch.see(values)
    watch.check()


def guided_logits(predictor: Predictor, pack: Pack, guidance: float) -> LogitsOf:
    """Logits of the rows of tokens that are asked for."""
    conditional = _predict(predictor, pack).logits
    if guidance == 1.0:
        return conditional
    unconditional = _predict(predictor, without_latents(pack)).logits

    def guided(base: Tensor, logits: Tensor) -> Tensor:
        return base + guidance * (logits - base)

    def whole(rows: Tensor) -> Tensor:
        return guided(unconditional(rows).float(), conditional(rows).float())

    if not (isinstance(conditional, Logits) and isinstance(unconditional, Logits)):
        return whole
    both = unconditional.blocks, conditional.blocks
    return Logits(whole, lambda rows: map(guided, *(blocks(rows) for blocks in both)))


def guided_latents(predictor: Predictor, pack: Pack, guidance: float, mask_id: int) -> Tensor:
    """(N, S, C) clean latents."""
    conditional = _latents(predictor, pack)
    if guidance == 1.0:
        return conditional
    unconditional = _latents(predictor, without_text(pack, mask_id))
    return unconditional + guidance * (conditional - unconditional)


def without_latents(pack: Pack) -> Pack:
    """The same text with the latents that guidance leads away from, or else with pure noise."""
    if pack.against is not None:
        return replace(pack, noisy_latents=pack.against, latent_time=torch.zeros_like(pack.latent_time))
    noise = pack.noise
    if noise is None:
        noise = latent_noise(pack.keys, pack.noisy_latents.shape[1:])
        noise = send_tensor(noise, pack.noisy_latents.device)
    return replace(pack, noisy_latents=noise, latent_time=torch.ones_like(pack.latent_time))


def without_text(pack: Pack, mask_id: int) -> Pack:
    """The same latents with a text of masks."""
    masks = torch.full_like(pack.noisy_tokens, mask_id)
    return replace(pack, noisy_tokens=masks, text_time=torch.ones_like(pack.text_time))


def _latents(predictor: Predictor, pack: Pack) -> Tensor:
    latents = _predict(predictor, pack).latents()
    pack.watch.see(latents)
    return latents


def _predict(predictor: Predictor, pack: Pack) -> Prediction:
    """One pass of the network, which is counted."""
    if pack.tally is not None:
        pack.tally.add()
    inputs = (pack.noisy_tokens, pack.noisy_latents, pack.text_time, pack.latent_time)
    return predictor.predict(*inputs, pack.layout)
