"""The loop over steps: of the text, of the latents, or of both, each conditioned on the current state of the other.

    for step in steps:
        pack = moves.make(predictor, pack, number)   or   LATENT_STEPS[solver](predictor, pack, ...)

Nothing in a step makes the host wait for the device. `fetch` begins the copy of what a chain ends with, and the host
waits for that copy alone while the device works on later chains.

`sample_text` and `sample_latents` are the shortest way from a denoiser of your own to samples; they also work inside a
training loop. Shapes: N documents, T tokens, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmldlm.corruption.joint import Corruption
from mmldlm.layout import packed_layout
from mmldlm.model.denoiser import Denoiser
from mmldlm.sampling.moves import time_of_share
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.orders import TextMoves
from mmldlm.sampling.pack import (
    Arrange,
    Fetched,
    Pack,
    Places,
    Step,
    Tally,
    document_keys,
    interleave,
    latent_noise,
    make_steps,
    send,
)
from mmldlm.sampling.predictor import ModelPredictor, Predictor
from mmldlm.sampling.solvers import LATENT_STEPS, Solver

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
    with_noise: bool = False,
    tally: Tally | None = None,
    device: torch.device | str = "cpu",
    arrange: Arrange = packed_layout,
) -> Pack:
    """Where a chain starts. What is None starts as noise; tokens other than masks stay as they are."""
    mask_id, num = corruption.text.mask_id, len(lengths)
    text = np.full(int(lengths.sum()), mask_id)
    if tokens is not None:
        text = np.concatenate(tokens).astype(np.int64)
    free = None if tokens is None else text == mask_id
    noise = latent_noise(keys, latent_shape) if latents is None or with_noise else torch.empty(0)
    text_time = torch.ones(num)
    if free is not None:
        num_free = np.bincount(np.repeat(np.arange(num), lengths)[free], minlength=num)
        text_time = time_of_share(num_free / lengths, corruption.text)
    start = _Start(
        torch.from_numpy(text),
        noise if latents is None else latents,
        text_time,
        torch.full((num,), 1.0 if latents is None else latent_time),
        noise,
        torch.empty(0) if against is None else against,
    )
    there = send(start, torch.device(device))
    return Pack(
        there.noisy_tokens,
        there.noisy_latents,
        there.text_time,
        there.latent_time,
        lengths,
        keys,
        free=free,
        noise=there.noise if len(noise) else None,
        against=None if against is None else there.against,
        tally=tally,
        places=Places(lengths, latent_shape[0], there.noisy_tokens.device, arrange),
    )


@dataclass(frozen=True)
class _Start:
    noisy_tokens: Tensor
    noisy_latents: Tensor
    text_time: Tensor
    latent_time: Tensor
    noise: Tensor
    against: Tensor


@torch.no_grad()
def run_chain(
    predictor: Predictor,
    start: Pack,
    steps: Sequence[Step],
    corruption: Corruption,
    options: SamplingOptions,
    on_step: Callable[[float], None] = lambda share: None,
) -> Pack:
    """Take the steps one after the other; a modality without steps stays as it is.

    `on_step` is told the share of the chain that is launched.
    """
    latent_step, pack = LATENT_STEPS[options.latent_sampler], start
    solver = Solver(predictor, corruption.latent, options.guidance, corruption.vocab_size)
    of_text = [step for step in steps if step.modality == "text"]
    text_only = len(of_text) == len(steps)
    moves = TextMoves(pack, corruption.text, of_text, options, text_only=text_only) if of_text else None
    if text_only and moves is not None:
        for number in range(len(moves)):
            pack = moves.make(predictor, pack, number)
            on_step((number + 1) / len(moves))
        return pack
    for done, step in enumerate(steps, 1):
        if step.modality == "text":
            assert moves is not None
            pack = moves.make(predictor, pack, step.step_idx)
        else:
            pack = latent_step(solver, pack, step)
        on_step(done / len(steps))
    return pack


def finished(pack: Pack) -> Pack:
    """The pack, once the device has computed it; a model that predicted NaN or infinity is rejected."""
    pack.watch.check()
    return pack


@dataclass(frozen=True)
class Sampled:
    """What a chain ends with."""

    tokens: Tensor
    """(T,)"""
    latents: Tensor
    """(N, S, C)"""
    bad: Tensor
    """For each prediction of the model, whether it held NaN or infinity."""


def fetch(pack: Pack) -> Fetched[Sampled]:
    """The end of a chain on its way to the host."""
    sampled = Sampled(pack.noisy_tokens, pack.noisy_latents, pack.watch.flags())
    return Fetched(sampled, pack.noisy_tokens.device)


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
    pack = start_pack(
        corruption,
        counts,
        keys,
        latents.float().cpu(),
        shape,
        with_noise=options.guidance != 1.0,
        device=latents.device,
    )
    predictor = ModelPredictor(denoiser, corruption, latents.device)
    return finished(run_chain(predictor, pack, text_steps(options), corruption, options)).split_tokens()


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
        corruption,
        counts,
        document_keys(options.seed, len(counts)),
        None,
        shape,
        tokens=tokens,
        device=device,
    )
    predictor = ModelPredictor(denoiser, corruption, torch.device(device))
    return finished(
        run_chain(predictor, pack, encode_steps(options, corruption), corruption, options)
    ).noisy_latents
