"""Predictions that follow the other modality more strongly (or less) than the network does by itself.

    guided = unconditional + guidance * (conditional - unconditional)

The unconditional prediction sees the other modality at time 1, as when training drops the condition: for text
that is pure latent noise, for latents a text of masks. With `Pack.against`, the text is compared with the prediction
for those latents instead. Guidance 1 is the network itself and costs one pass.
Shapes: R rows of tokens, V vocabulary, N documents, S latent slots, C latent channels.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmldlm.sampling.pack import Pack, latent_noise
from mmldlm.sampling.predictor import LogitsOf, Prediction, Predictor


def guided_logits(predictor: Predictor, pack: Pack, guidance: float) -> LogitsOf:
    """Logits of the rows of tokens that are asked for."""
    conditional = _predict(predictor, pack).logits
    if guidance == 1.0:
        return conditional
    unconditional = _predict(predictor, without_latents(pack)).logits

    def guided(rows: Tensor) -> Tensor:
        base = unconditional(rows)
        return base + guidance * (conditional(rows) - base)

    return guided


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
        noise = latent_noise(pack.keys, pack.noisy_latents.shape[1:]).to(pack.noisy_latents.device)
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
