"""Self-conditioning in training: a first pass without gradient, of which the second one is told.

The first pass sees the same noisy documents, so what both passes say is still a function of these alone. Half of the
documents, by a coin of their own, are told nothing, so that the denoiser also works where there is no earlier pass.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmldlm.corruption.latent import LatentProcess
from mmldlm.model.denoiser import Denoiser
from mmldlm.types import DenoiserOutput, NoisyBatch, Previous


def denoise(denoiser: Denoiser, batch: NoisyBatch, process: LatentProcess) -> DenoiserOutput:
    """What the denoiser says about a noisy micro-batch, in two passes where it conditions on itself."""
    previous = None
    if denoiser.config.self_conditioning:
        previous = known_to(batch.self_conditioned, first_answer(denoiser, batch, process), batch)
    output: DenoiserOutput = denoiser(*_inputs(batch), batch.layout, previous)
    return output


def first_answer(denoiser: Denoiser, batch: NoisyBatch, process: LatentProcess) -> Previous:
    """What the denoiser says when it has said nothing before; no gradient flows into it."""
    device = batch.text_time.device.type
    # weights that are cast without gradient must not be taken from autocast's cache by the pass with gradient
    cast = torch.autocast(
        device,
        dtype=torch.get_autocast_dtype(device),
        enabled=torch.is_autocast_enabled(device),
        cache_enabled=False,
    )
    with torch.no_grad(), cast:
        output: DenoiserOutput = denoiser(*_inputs(batch), batch.layout)
        clean = process.clean_of_output(output.latent_prediction, batch.noisy_latents, batch.latent_time)
    return Previous(output.token_hidden, clean)


def known_to(documents: Tensor, said: Previous, batch: NoisyBatch) -> Previous:
    """What was said, for these documents (N,) bool only."""
    tokens = documents.index_select(0, batch.layout.document)
    return replace(
        said,
        token_hidden=said.token_hidden.masked_fill(~tokens[:, None], 0.0),
        clean_latents=said.clean_latents.masked_fill(~documents[:, None, None], 0.0),
    )


def _inputs(batch: NoisyBatch) -> tuple[Tensor, ...]:
    return (batch.noisy_tokens, batch.noisy_latents, batch.text_time, batch.latent_time)
