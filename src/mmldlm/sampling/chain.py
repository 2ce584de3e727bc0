"""The loop over steps: of the text, of the latents, or of both, each conditioned on the current state of the other.

    for step in steps:
        pack = TEXT_STEPS[order](predictor, pack, ...)   or   LATENT_STEPS[solver](predictor, pack, ...)

`sample_text` and `sample_latents` are the shortest way from a denoiser of your own to samples; they also work inside a
training loop. Shapes: N documents, T tokens, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mmldlm.corruption.joint import Corruption
from mmldlm.model.denoiser import Denoiser
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.orders import TEXT_STEPS, masked_tokens, time_of_share
from mmldlm.sampling.pack import Pack, Step, Tally, document_keys, interleave, latent_noise, make_steps
from mmldlm.sampling.predictor import ModelPredictor, Predictor
from mmldlm.sampling.solvers import LATENT_STEPS

NOISE_ENCODE_STEPS = 16
"""Steps of t2l by default where the network predicts noise."""


def text_steps(options: SamplingOptions) -> list[Step]:
    """From all masked to none."""
    return make_steps("text", options.num_sampling_steps)


def latent_steps(num_steps: int, corruption: Corruption) -> list[Step]:
    """From the last time at which the network's prediction says something, to 0."""
    return make_steps("latent", num_steps, corruption.latent.latest_time)


def encode_steps(options: SamplingOptions, corruption: Corruption) -> list[Step]:
    """One step to the mean of what the network predicts, unless more are requested or one is not enough: a prediction
    of noise says little about the latent at time 1."""
    default = NOISE_ENCODE_STEPS if corruption.config.prediction_type == "noise" else 1
    return latent_steps(options.num_encode_steps or default, corruption)


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


def start_pack(
    corruption: Corruption,
    lengths: np.ndarray,
    keys: np.ndarray,
    latents: Tensor | None,
    latent_shape: tuple[int, int],
    *,
    tokens: Sequence[np.ndarray] | None = None,
    latent_time: float = 0.0,
    against: Tensor | None = None,
    tally: Tally | None = None,
) -> Pack:
    """Where a chain starts. What is None starts as noise; tokens other than masks stay as they are."""
    text = torch.full((int(lengths.sum()),), corruption.text.mask_id)
    if tokens is not None:
        text = torch.from_numpy(np.concatenate(tokens).astype(np.int64))
    pack = Pack(
        noisy_tokens=text,
        noisy_latents=latent_noise(keys, latent_shape) if latents is None else latents,
        text_time=torch.ones(len(lengths)),
        latent_time=torch.full((len(lengths),), 1.0 if latents is None else latent_time),
        lengths=lengths,
        keys=keys,
        against=against,
        tally=tally,
    )
    if tokens is None:
        return pack
    masked = masked_tokens(pack, corruption.text)
    return replace(pack, fixed=~masked, text_time=time_of_share(pack, masked, corruption.text))


def run_chain(
    predictor: Predictor,
    start: Pack,
    steps: Sequence[Step],
    corruption: Corruption,
    options: SamplingOptions,
    on_step: Callable[[int], None] = lambda num_documents: None,
) -> Pack:
    """Take the steps one after the other; a modality without steps stays as it is."""
    text_step, latent_step = TEXT_STEPS[options.text_sampler], LATENT_STEPS[options.latent_sampler]
    pack = start
    for step in steps:
        if step.modality == "text":
            pack = text_step(predictor, pack, corruption.text, step, options)
        else:
            pack = latent_step(predictor, pack, corruption.latent, corruption.vocab_size, step, options)
        on_step(len(pack.keys))
    return pack


def sample_text(
    denoiser: Denoiser,
    corruption: Corruption,
    latents: Tensor,
    lengths: Sequence[int] | np.ndarray,
    options: SamplingOptions | None = None,
) -> list[np.ndarray]:
    """Token ids for normalised latents (N, S, C) by a denoiser in whatever state it is; one pack, no checks.

    >>> import torch
    >>> from mmldlm import Corruption, Denoiser
    >>> from mmldlm.config import ModelConfig
    >>> from mmldlm.model.denoiser import DataShape
    >>> shape = DataShape(vocab_size=20, num_slots=1, num_channels=4, max_length=8)
    >>> denoiser, corruption = Denoiser(ModelConfig(preset="tiny"), shape), Corruption(vocab_size=20)
    >>> [len(text) for text in sample_text(denoiser, corruption, torch.zeros(2, 1, 4), lengths=[3, 5])]
    [3, 5]
    """
    options, counts = options or SamplingOptions(), np.asarray(lengths, np.int64)
    keys, shape = document_keys(options.seed, len(counts)), (latents.shape[1], latents.shape[2])
    pack = start_pack(corruption, counts, keys, latents.float().cpu(), shape)
    predictor = ModelPredictor(denoiser, corruption, latents.device)
    return run_chain(predictor, pack, text_steps(options), corruption, options).split_tokens()


def sample_latents(
    denoiser: Denoiser,
    corruption: Corruption,
    tokens: Sequence[np.ndarray],
    device: torch.device | str = "cpu",
    options: SamplingOptions | None = None,
) -> Tensor:
    """Normalised latents (N, S, C) for token ids by a denoiser in whatever state it is; one pack, no checks.

    >>> import numpy as np
    >>> from mmldlm import Corruption, Denoiser
    >>> from mmldlm.config import ModelConfig
    >>> from mmldlm.model.denoiser import DataShape
    >>> shape = DataShape(vocab_size=20, num_slots=1, num_channels=4, max_length=8)
    >>> denoiser, corruption = Denoiser(ModelConfig(preset="tiny"), shape), Corruption(vocab_size=20)
    >>> sample_latents(denoiser, corruption, [np.array([3, 1, 7])]).shape
    torch.Size([1, 1, 4])
    """
    options, counts = options or SamplingOptions(), np.array([len(text) for text in tokens], np.int64)
    shape = (denoiser.shape.num_slots, denoiser.shape.num_channels)
    pack = start_pack(
        corruption, counts, document_keys(options.seed, len(counts)), None, shape, tokens=tokens
    )
    predictor = ModelPredictor(denoiser, corruption, torch.device(device))
    return run_chain(predictor, pack, encode_steps(options, corruption), corruption, options).noisy_latents
