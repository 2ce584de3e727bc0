"""A chain of steps: of the text, of the latents, or of both, each seeing the other as it is by then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from mmldlm.corruption.joint import Corruption
from mmldlm.sampling.latent import LATENT_STEPS
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack
from mmldlm.sampling.predictor import Predictor
from mmldlm.sampling.steps import Step, interleave, make_steps
from mmldlm.sampling.text import TEXT_STEPS

UNSURE_ENCODE_STEPS = 16


def text_steps(options: SamplingOptions) -> list[Step]:
    """From all masked to none."""
    return make_steps("text", options.num_sampling_steps)


def latent_steps(num_steps: int, corruption: Corruption) -> list[Step]:
    """From the last time at which the network's prediction says something, to 0."""
    return make_steps("latent", num_steps, corruption.latent.latest_time)


def encode_steps(options: SamplingOptions, corruption: Corruption) -> list[Step]:
    """One step to the mean of what the network predicts, unless more are requested or one is not enough: a prediction
    of noise says little about the latent at time 1."""
    unsure = corruption.config.prediction_type == "noise"
    return latent_steps(options.num_encode_steps or (UNSURE_ENCODE_STEPS if unsure else 1), corruption)


def joint_steps(options: SamplingOptions, corruption: Corruption) -> list[Step]:
    """Text and latents in turn, or one after the other."""
    latent, text = latent_steps(options.num_latent_steps, corruption), text_steps(options)
    if options.joint_order == "interleaved":
        return interleave(latent, text)
    return [*latent, *text] if options.joint_order == "latent_first" else [*text, *latent]


def vary_steps(options: SamplingOptions, latent_time: float) -> list[Step]:
    """Text from the start and latents from a time on, in turn."""
    latent = make_steps("latent", options.num_latent_steps, latent_time) if latent_time > 0 else []
    return interleave(latent, text_steps(options))


def run_chain(
    predictor: Predictor,
    start: Pack,
    steps: list[Step],
    corruption: Corruption,
    options: SamplingOptions,
    on_step: Callable[[int], None] = lambda num_documents: None,
) -> Pack:
    """Take the steps one after the other; what has no step stays as it is."""
    text_step, latent_step = TEXT_STEPS[options.text_sampler], LATENT_STEPS[options.latent_sampler]
    pack = start
    for step in steps:
        if step.modality == "text":
            pack = _with_given(text_step(predictor, pack, corruption.text, step, options), start)
        else:
            pack = latent_step(predictor, pack, corruption.latent, corruption.vocab_size, step, options)
        on_step(len(pack.keys))
    return pack


def _with_given(pack: Pack, start: Pack) -> Pack:
    """The pack with every token that was given as it was, whatever a sampler makes of it."""
    if pack.fixed is None:
        return pack
    fixed = torch.from_numpy(pack.fixed)
    return replace(pack, noisy_tokens=torch.where(fixed, start.noisy_tokens, pack.noisy_tokens))
