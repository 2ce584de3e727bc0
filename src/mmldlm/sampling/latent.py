"""The latent sampler: DDIM, a deterministic path from the document's noise to a latent.

    next = signal(s) * clean + sigma(s) * noise,   noise = (noisy - signal(t) * clean) / sigma(t)

One step gives the mean of the latent given the condition.
Shapes: N documents, S latent slots, C latent channels.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mmldlm.corruption.latent import LatentProcess
from mmldlm.sampling.guidance import guided_latents
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Predictor
from mmldlm.sampling.steps import Step


def ddim_step(
    predictor: Predictor,
    pack: Pack,
    process: LatentProcess,
    mask_id: int,
    step: Step,
    options: SamplingOptions,
) -> Pack:
    """Move the latents to the step's next time."""
    time = torch.full_like(pack.latent_time, step.time)
    pack = replace(pack, latent_time=time)
    clean = guided_latents(predictor, pack, options.guidance, mask_id)
    # the predictor speaks of clean latents, whatever its network predicts
    noise = replace(process, prediction_type="clean").to_noise(clean, pack.noisy_latents, time)
    next_time = torch.full_like(time, step.next_time)
    return replace(pack, noisy_latents=process.corrupt(clean, noise, next_time), latent_time=next_time)
