"""Sampling with a trained model: latents to text, text to latents, both from nothing, and texts with blanks.

Documents are sampled in packs and come back in their order; the packs leave no trace in the samples.
Shapes: n documents, N documents in a pack, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.errors import UserError
from mmldlm.sampling.blanks import some_blanks
from mmldlm.sampling.checks import (
    check_blanks,
    check_latents,
    check_lengths,
    check_tokens,
    require_conditional,
    require_guidable,
    require_trained,
    require_unconditional,
    trained_parts,
)
from mmldlm.sampling.draw import draw
from mmldlm.sampling.joint import encode_steps, joint_steps, run_chain, text_steps, vary_steps
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, Tally, group_documents, latent_noise
from mmldlm.sampling.pack import document_keys as document_keys
from mmldlm.sampling.predictor import ModelPredictor
from mmldlm.sampling.steps import Step
from mmldlm.sampling.unmask import masked_tokens, time_of_share

Progress = Callable[[int, int], None]
"""Called with the work done and the work in all, counted in steps of documents."""


def decode_latents(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    lengths: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
    against: np.ndarray | None = None,
    passes: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Texts (token ids) for normalised latents (n, S, C); lengths that are not given are drawn.

    `against`, normalised latents too, is what guidance leads away from. To `passes`, int64 (n,), is added how often the
    network was asked about each document, here and below.
    """
    require_trained(model, text=True)
    require_conditional(model)
    if against is None:
        require_guidable(model, options.guidance)
    run = _Sampling(model, options, keys, progress, passes)
    clean = torch.from_numpy(check_latents(model, latents))
    lengths = run.settle_lengths(lengths, clean, latent_time=0.0)
    start = _Start(lengths, latents=clean, against=_against(model, against, len(clean)))
    return run.sample(start, text_steps(options)).tokens


def encode_tokens(
    model: LoadedModel,
    tokens: list[np.ndarray],
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    progress: Progress | None = None,
    passes: np.ndarray | None = None,
) -> np.ndarray:
    """Normalised latents (n, S, C) for texts (token ids)."""
    require_trained(model, latent=True)
    require_guidable(model, options.guidance)
    run = _Sampling(model, options, keys, progress, passes)
    lengths = check_tokens(model, tokens)
    steps = encode_steps(options, model.corruption)
    return run.sample(_Start(lengths, tokens=tokens), steps).latents


def generate(
    model: LoadedModel,
    count: int,
    options: SamplingOptions,
    *,
    lengths: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
    passes: np.ndarray | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Texts and their normalised latents (n, S, C), both from noise."""
    require_trained(model, text=True, latent=True)
    require_guidable(model, options.guidance)
    assert len(keys) == count, "one key for each document"
    run = _Sampling(model, options, keys, progress, passes)
    lengths = run.settle_lengths(lengths, run.noise, latent_time=1.0)
    result = run.sample(_Start(lengths), joint_steps(options, model.corruption))
    return result.tokens, result.latents


def infill_tokens(
    model: LoadedModel,
    tokens: list[np.ndarray],
    options: SamplingOptions,
    *,
    latents: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
    against: np.ndarray | None = None,
    passes: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Texts whose blanks, tokens with the id after the vocabulary, are filled; all other tokens stay.

    With normalised latents (n, S, C) they are filled to suit those; without, from the text around them alone.
    """
    require_trained(model, text=True)
    run = _Sampling(model, options, keys, progress, passes)
    lengths = check_blanks(model, tokens)
    if latents is None:
        require_unconditional(model)
        start = _Start(lengths, tokens=tokens)
    else:
        require_conditional(model)
        if against is None:
            require_guidable(model, options.guidance)
        clean = torch.from_numpy(check_latents(model, latents))
        start = _Start(lengths, tokens, clean, against=_against(model, against, len(clean)))
    return run.sample(start, text_steps(options)).tokens


def vary(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    strength: float,
    tokens: list[np.ndarray] | None = None,
    lengths: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
    passes: np.ndarray | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Texts and latents near normalised latents (n, S, C): these are noised to time `strength`, then both are sampled.

    Given tokens may hold blanks and stay elsewhere; without them the text is all new.
    """
    require_trained(model, text=True, latent=True)
    require_guidable(model, options.guidance)
    run = _Sampling(model, options, keys, progress, passes)
    process = model.corruption.latent
    time = min(strength, process.latest_time)
    clean = torch.from_numpy(check_latents(model, latents))
    noisy = process.corrupt(clean, run.noise, torch.full((len(clean),), time))
    if tokens is None:
        lengths = run.settle_lengths(lengths, clean, latent_time=0.0)
    else:
        lengths = check_blanks(model, tokens)
    start = _Start(lengths, tokens, noisy, latent_time=time)
    result = run.sample(start, vary_steps(options, time))
    return result.tokens, result.latents


def paraphrase_tokens(
    model: LoadedModel,
    tokens: list[np.ndarray],
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    strength: float,
    what: str,
    lengths: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Texts near given ones: their normalised latents (n, S, C) are noised, some tokens are masked, or both."""
    blanks = some_blanks(tokens, keys, strength, model.corruption.text.mask_id)
    if what == "text":
        return infill_tokens(model, blanks, options, latents=latents, keys=keys, progress=progress)
    given = blanks if what == "both" else None
    return vary(
        model,
        latents,
        options,
        strength=strength,
        tokens=given,
        lengths=lengths,
        keys=keys,
        progress=progress,
    )[0]


def _against(model: LoadedModel, latents: np.ndarray | None, count: int) -> Tensor | None:
    if latents is None:
        return None
    checked = check_latents(model, latents)
    assert len(checked) == count, "one latent to be led away from for each document"
    return torch.from_numpy(checked)


@dataclass(frozen=True)
class _Start:
    """What is given of each document; what is None starts as noise."""

    lengths: np.ndarray
    tokens: list[np.ndarray] | None = None
    """With the mask's id where something is to be found; all else stays."""
    latents: Tensor | None = None
    latent_time: float = 0.0
    """Of the given latents."""
    against: Tensor | None = None


@dataclass(frozen=True)
class _Result:
    tokens: list[np.ndarray]
    latents: np.ndarray


class _Sampling:
    """One call: a model, its options and the documents' keys."""

    def __init__(
        self,
        model: LoadedModel,
        options: SamplingOptions,
        keys: np.ndarray,
        progress: Progress | None,
        passes: np.ndarray | None,
    ) -> None:
        self.model, self.options, self.keys, self.progress = model, options, keys, progress
        self.passes = passes
        self.predictor = ModelPredictor(model)
        self.latent_shape = (model.denoiser.shape.num_slots, model.denoiser.shape.num_channels)

    @cached_property
    def noise(self) -> Tensor:
        """(n, S, C), where every chain of latents starts."""
        return latent_noise(self.keys, self.latent_shape)

    def settle_lengths(self, given: np.ndarray | None, latents: Tensor, latent_time: float) -> np.ndarray:
        """The given lengths, or lengths drawn from what the model says about latents at this time."""
        if given is not None:
            return check_lengths(given, len(self.keys))
        if not trained_parts(self.model).length:
            raise UserError("this model does not predict the length of a text; pass lengths")
        logits = self.predictor.length_logits(latents, torch.full((len(latents),), latent_time))
        uniform = randomness.uniform(self.keys, randomness.LENGTH, np.zeros_like(self.keys))
        numbers = torch.from_numpy(uniform).to(logits.device)
        if (
            latent_time == 1.0
        ):  # from nothing there is no best length: it is drawn as the texts' lengths are spread
            return draw(logits, numbers, 1.0, 1.0).cpu().numpy() + 1
        return draw(logits, numbers, self.options.temperature, self.options.top_p).cpu().numpy() + 1

    def sample(self, start: _Start, steps: list[Step]) -> _Result:
        """Run the chain of every document."""
        lengths = start.lengths
        assert len(lengths) == len(self.keys), "one key for each document"
        latent_shape = (len(lengths), *self.latent_shape)
        result = _Result([np.empty(0, np.int64)] * len(lengths), np.empty(latent_shape, np.float32))
        report = self._reporter(len(lengths) * len(steps))
        for indices in group_documents(lengths, self.latent_shape[0], self.options.batch_tokens):
            first = self._first_pack(start, indices)
            pack = run_chain(self.predictor, first, steps, self.model.corruption, self.options, report)
            result.latents[indices] = pack.noisy_latents.numpy()
            for index, text in zip(indices, pack.split_tokens(), strict=True):
                result.tokens[index] = text
        return result

    def _first_pack(self, start: _Start, indices: np.ndarray) -> Pack:
        process, lengths, chosen = (
            self.model.corruption.text,
            start.lengths[indices],
            torch.from_numpy(indices),
        )
        if start.tokens is None:
            text = torch.full((int(lengths.sum()),), process.mask_id)
        else:
            text = torch.from_numpy(np.concatenate([start.tokens[i] for i in indices]).astype(np.int64))
        pack = Pack(
            noisy_tokens=text,
            noisy_latents=(self.noise if start.latents is None else start.latents)[chosen],
            text_time=torch.ones(len(indices)),
            latent_time=torch.full((len(indices),), 1.0 if start.latents is None else start.latent_time),
            lengths=lengths,
            keys=self.keys[indices],
            against=None if start.against is None else start.against[chosen],
            tally=None if self.passes is None else Tally(self.passes, indices),
        )
        if start.tokens is None:
            return pack
        masked = masked_tokens(pack, process)
        return replace(pack, fixed=~masked, text_time=time_of_share(pack, masked, process))

    def _reporter(self, total: int) -> Callable[[int], None]:
        done = 0

        def report(num_documents: int) -> None:
            nonlocal done
            done += num_documents
            if self.progress is not None:
                self.progress(done, total)

        return report
