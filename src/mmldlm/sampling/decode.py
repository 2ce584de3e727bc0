"""Sampling with a trained model: latents to text, text to latents, both from nothing.

Documents are sampled in packs and come back in their order; the packs leave no trace in the samples.
Shapes: n documents, N documents in a pack, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.checkpoint.loaded import LoadedModel
from mmldlm.errors import UserError
from mmldlm.sampling.checks import check_latents, check_lengths, check_tokens, require_trained, trained_parts
from mmldlm.sampling.draw import draw
from mmldlm.sampling.joint import encode_steps, joint_steps, run_chain, text_steps
from mmldlm.sampling.options import SamplingOptions
from mmldlm.sampling.pack import Pack, group_documents, latent_noise
from mmldlm.sampling.predictor import ModelPredictor
from mmldlm.sampling.steps import Step

Progress = Callable[[int, int], None]
"""Called with the work done and the work in all, counted in steps of documents."""


def document_keys(seed: int, count_or_ids: int | np.ndarray | Sequence[int]) -> np.ndarray:
    """(n,) the documents' own sources of randomness, from their ids or, given a count, from their places."""
    ids = np.arange(count_or_ids) if isinstance(count_or_ids, int | np.integer) else np.asarray(count_or_ids)
    return randomness.make_key(seed, ids)


def decode_latents(
    model: LoadedModel,
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    lengths: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
) -> list[np.ndarray]:
    """Texts (token ids) for normalised latents (n, S, C); lengths that are not given are drawn."""
    require_trained(model, text=True)
    run = _Sampling(model, options, keys, progress)
    clean = torch.from_numpy(check_latents(model, latents))
    lengths = run.settle_lengths(lengths, clean, latent_time=0.0)
    return run.sample(None, clean, lengths, text_steps(options)).tokens


def encode_tokens(
    model: LoadedModel,
    tokens: list[np.ndarray],
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    progress: Progress | None = None,
) -> np.ndarray:
    """Normalised latents (n, S, C) for texts (token ids)."""
    require_trained(model, latent=True)
    run = _Sampling(model, options, keys, progress)
    lengths = check_tokens(model, tokens)
    return run.sample(tokens, None, lengths, encode_steps(options, model.corruption)).latents


def generate(
    model: LoadedModel,
    count: int,
    options: SamplingOptions,
    *,
    lengths: np.ndarray | None = None,
    keys: np.ndarray,
    progress: Progress | None = None,
) -> tuple[list[np.ndarray], np.ndarray]:
    """Texts and their normalised latents (n, S, C), both from noise."""
    require_trained(model, text=True, latent=True)
    assert len(keys) == count, "one key for each document"
    run = _Sampling(model, options, keys, progress)
    lengths = run.settle_lengths(lengths, run.noise, latent_time=1.0)
    result = run.sample(None, None, lengths, joint_steps(options, model.corruption))
    return result.tokens, result.latents


@dataclass(frozen=True)
class _Result:
    tokens: list[np.ndarray]
    latents: np.ndarray


class _Sampling:
    """One call: a model, its options and the documents' keys."""

    def __init__(
        self, model: LoadedModel, options: SamplingOptions, keys: np.ndarray, progress: Progress | None
    ) -> None:
        self.model, self.options, self.keys, self.progress = model, options, keys, progress
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
            raise UserError("this model does not predict the length of a text; state it with --length")
        logits = self.predictor.length_logits(latents, torch.full((len(latents),), latent_time))
        uniform = randomness.uniform(self.keys, randomness.LENGTH, np.zeros_like(self.keys))
        numbers = torch.from_numpy(uniform).to(logits.device)
        if (
            latent_time == 1.0
        ):  # from nothing there is no best length: it is drawn as the texts' lengths are spread
            return draw(logits, numbers, 1.0, 1.0).cpu().numpy() + 1
        return draw(logits, numbers, self.options.temperature, self.options.top_p).cpu().numpy() + 1

    def sample(
        self, tokens: list[np.ndarray] | None, latents: Tensor | None, lengths: np.ndarray, steps: list[Step]
    ) -> _Result:
        """Run the chain of every document; what is given stays as it is, what is None starts as noise."""
        assert len(lengths) == len(self.keys), "one key for each document"
        latent_shape = (len(lengths), *self.latent_shape)
        result = _Result([np.empty(0, np.int64)] * len(lengths), np.empty(latent_shape, np.float32))
        report = self._reporter(len(lengths) * len(steps))
        for indices in group_documents(lengths, self.latent_shape[0], self.options.batch_tokens):
            start = self._start(tokens, latents, lengths, indices)
            pack = run_chain(self.predictor, start, steps, self.model.corruption, self.options, report)
            result.latents[indices] = pack.noisy_latents.numpy()
            for index, text in zip(indices, pack.split_tokens(), strict=True):
                result.tokens[index] = text
        return result

    def _start(
        self,
        tokens: list[np.ndarray] | None,
        latents: Tensor | None,
        lengths: np.ndarray,
        indices: np.ndarray,
    ) -> Pack:
        if tokens is None:
            text = torch.full((int(lengths[indices].sum()),), self.model.corruption.text.mask_id)
        else:
            text = torch.from_numpy(np.concatenate([tokens[i] for i in indices]).astype(np.int64))
        chosen = torch.from_numpy(indices)
        return Pack(
            noisy_tokens=text,
            noisy_latents=(self.noise if latents is None else latents)[chosen],
            text_time=torch.full((len(indices),), 1.0 if tokens is None else 0.0),
            latent_time=torch.full((len(indices),), 1.0 if latents is None else 0.0),
            lengths=lengths[indices],
            keys=self.keys[indices],
        )

    def _reporter(self, total: int) -> Callable[[int], None]:
        done = 0

        def report(num_documents: int) -> None:
            nonlocal done
            done += num_documents
            if self.progress is not None:
                self.progress(done, total)

        return report
