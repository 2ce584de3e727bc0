"""Sampling with a trained model: latents to text, text to latents, both from nothing, and texts with blanks.

Documents are sampled in packs and come back in their order; the samples do not depend on the packs.
Shapes: n documents, N documents in a pack, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.tokenizer import split_texts
from mmldlm.errors import UserError
from mmldlm.sampling.chain import (
    Sampled,
    encode_steps,
    fetch,
    joint_steps,
    run_chain,
    start_pack,
    text_steps,
    vary_steps,
)
from mmldlm.sampling.options import (
    SamplingOptions,
    require_conditional,
    require_guidable,
    require_trained,
    require_unconditional,
)
from mmldlm.sampling.orders import draw
from mmldlm.sampling.pack import (
    Fetched,
    Step,
    Tally,
    group_documents,
    latent_noise,
    make_steps,
    reject_bad,
)
from mmldlm.sampling.predictor import ModelPredictor

Progress = Callable[[int, int], None]
"""Called with the work done and the total work, counted in steps of documents."""
_LENGTHS_AT_ONCE = 8192
"""Documents whose length is predicted at a time."""
READ_TIME = 0.5
"""How noisy latents are when `read_errors` looks at them. Of 0.3, 0.5, 0.7, 0.8, 0.9 and 1 it told texts of a latent
apart best (docs/results.md)."""
PACKS_AHEAD = 3
"""Packs that are launched before the first of them is waited for."""


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
    """Texts (token ids) for normalised latents (n, S, C); lengths that are None are predicted.

    `against`, normalised latents too, is what guidance leads away from. The number of passes of the network is added to
    `passes`, int64 (n,).
    """
    require_trained(model, text=True)
    require_conditional(model)
    if against is None:
        require_guidable(model, options.guidance)
    call = _Call(model, options, keys, progress, passes)
    clean = _tensor(latents)
    lengths = call.lengths(lengths, clean, latent_time=0.0)
    start = _Start(lengths, latents=clean, against=None if against is None else _tensor(against))
    return call.sample(start, text_steps(options)).tokens


class LikelyLengths(NamedTuple):
    """Numbers of tokens for each document, the likeliest first. (n, count) both."""

    lengths: np.ndarray
    log_probabilities: np.ndarray


@torch.no_grad()
def likely_lengths(model: LoadedModel, latents: np.ndarray, count: int) -> LikelyLengths:
    """The likeliest lengths of the texts of normalised latents (n, S, C); fewer where the model knows fewer."""
    parts = [_length_logits(model, part, 0.0) for part in _tensor(latents).split(_LENGTHS_AT_ONCE)]
    top = torch.cat(parts).log_softmax(-1).topk(min(count, parts[0].shape[-1]), dim=-1)
    return LikelyLengths(top.indices.cpu().numpy() + 1, top.values.double().cpu().numpy())


def _length_logits(model: LoadedModel, latents: Tensor, latent_time: float) -> Tensor:
    """(n, longest) float32 on the device, for latents at this time."""
    head, device = model.denoiser.length_head, model.device
    if head is None or not model.trained.length:
        raise UserError("this model does not predict the length of a text; pass lengths")
    return head(latents.to(device), torch.full((len(latents),), latent_time, device=device)).float()


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
    call = _Call(model, options, keys, progress, passes)
    return call.sample(_Start(_lengths(tokens), tokens), encode_steps(options, model.corruption)).latents


def read_errors(
    model: LoadedModel,
    tokens: list[np.ndarray],
    latents: np.ndarray,
    options: SamplingOptions,
    *,
    keys: np.ndarray,
    passes: np.ndarray | None = None,
) -> np.ndarray:
    """(n,) how much of normalised latents (n, S, C) under noise the network misses that sees texts (token ids) of them.

    The mean square of its error in one pass; documents with the same key get the same noise.
    """
    require_trained(model, latent=True)
    call, clean, process = (
        _Call(model, options, keys, None, passes),
        _tensor(latents),
        model.corruption.latent,
    )
    noisy = process.corrupt(clean, call.noise, torch.full((len(clean),), READ_TIME))
    start = _Start(_lengths(tokens), tokens, noisy, latent_time=READ_TIME)
    missed = call.sample(start, make_steps("latent", 1, READ_TIME)).latents - latents
    return np.square(missed, dtype=np.float64).mean((1, 2))


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
    require_guidable(model, options.guidance)
    assert len(keys) == count, "one key for each document"
    call = _Call(model, options, keys, progress)
    lengths = call.lengths(lengths, call.noise, latent_time=1.0)
    result = call.sample(_Start(lengths), joint_steps(options, model.corruption))
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
) -> list[np.ndarray]:
    """Texts whose blanks, tokens with the id after the vocabulary, are filled; all other tokens stay.

    With normalised latents (n, S, C) they are filled to suit those; without, from the text around them alone.
    """
    require_trained(model, text=True)
    if latents is None:
        require_unconditional(model)
    else:
        require_conditional(model)
        if against is None:
            require_guidable(model, options.guidance)
    start = _Start(
        _lengths(tokens),
        tokens,
        None if latents is None else _tensor(latents),
        against=None if against is None else _tensor(against),
    )
    return _Call(model, options, keys, progress).sample(start, text_steps(options)).tokens


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
) -> tuple[list[np.ndarray], np.ndarray]:
    """Texts and latents near normalised latents (n, S, C): these are noised to time `strength`, then both are sampled.

    `tokens` may hold blanks and stay elsewhere; without them the text is all new.
    """
    require_trained(model, text=True, latent=True)
    require_guidable(model, options.guidance)
    call = _Call(model, options, keys, progress)
    process = model.corruption.latent
    time = min(strength, process.latest_time)
    clean = _tensor(latents)
    noisy = process.corrupt(clean, call.noise, torch.full((len(clean),), time))
    lengths = call.lengths(lengths, clean, latent_time=0.0) if tokens is None else _lengths(tokens)
    result = call.sample(_Start(lengths, tokens, noisy, latent_time=time), vary_steps(options, time))
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
    kept = blanks if what == "both" else None
    return vary(
        model, latents, options, strength=strength, tokens=kept, lengths=lengths, keys=keys, progress=progress
    )[0]


def some_blanks(tokens: list[np.ndarray], keys: np.ndarray, share: float, mask_id: int) -> list[np.ndarray]:
    """Texts with about this share of their tokens masked, at least one."""
    result = []
    for text, key in zip(tokens, keys, strict=True):
        chance = randomness.uniform(key, randomness.TEXT_MASK, np.arange(len(text)))
        result.append(np.where((chance < share) | (chance == chance.min()), mask_id, text))
    return result


def _lengths(tokens: list[np.ndarray]) -> np.ndarray:
    return np.array([len(text) for text in tokens], np.int64)


def _tensor(latents: np.ndarray) -> Tensor:
    return torch.from_numpy(np.require(latents, np.float32, ["C", "W"]))


@dataclass(frozen=True)
class _Start:
    """What is known of each document; what is None starts as noise."""

    lengths: np.ndarray
    tokens: list[np.ndarray] | None = None
    """With the mask's id where a token is to be sampled; all else stays."""
    latents: Tensor | None = None
    latent_time: float = 0.0
    """Of the latents."""
    against: Tensor | None = None


@dataclass(frozen=True)
class _Result:
    tokens: list[np.ndarray]
    latents: np.ndarray

    def put(self, indices: np.ndarray, lengths: np.ndarray, fetched: Fetched[Sampled]) -> None:
        """The documents of a pack, once the device is done with them; a model that predicted NaN is rejected."""
        sampled = fetched.wait()
        reject_bad(sampled.bad)
        self.latents[indices] = sampled.latents.numpy()
        tokens = sampled.tokens.numpy().copy()  # a caller who keeps a text keeps no page-locked memory
        for index, text in zip(indices.tolist(), split_texts(tokens, lengths), strict=True):
            self.tokens[index] = text


class _Call:
    """One call: a model, its options and the documents' keys."""

    def __init__(
        self,
        model: LoadedModel,
        options: SamplingOptions,
        keys: np.ndarray,
        progress: Progress | None,
        passes: np.ndarray | None = None,
    ) -> None:
        self.model, self.options, self.keys, self.progress = model, options, keys, progress
        self.passes = passes
        self.latent_shape = (model.denoiser.shape.num_slots, model.denoiser.shape.num_channels)

    @cached_property
    def noise(self) -> Tensor:
        """(n, S, C), where every chain of latents starts."""
        return latent_noise(self.keys, self.latent_shape)

    @torch.no_grad()
    def lengths(self, chosen: np.ndarray | None, latents: Tensor, latent_time: float) -> np.ndarray:
        """The chosen lengths, or lengths drawn from what the model predicts for latents at this time."""
        if chosen is not None:
            assert chosen.shape == self.keys.shape, "one length for each document"
            return chosen
        device = self.model.device
        uniform = torch.from_numpy(randomness.uniform(self.keys, randomness.LENGTH, np.zeros_like(self.keys)))
        # from nothing there is no best length: it is drawn as the lengths of the training texts are distributed
        how = (1.0, 1.0) if latent_time == 1.0 else (self.options.temperature, self.options.top_p)
        drawn = []
        for part, numbers in zip(
            latents.split(_LENGTHS_AT_ONCE), uniform.split(_LENGTHS_AT_ONCE), strict=True
        ):
            logits = _length_logits(self.model, part, latent_time)
            drawn.append(draw(logits, numbers.to(device), *how).cpu().numpy() + 1)
        return np.concatenate(drawn)

    def sample(self, start: _Start, steps: list[Step]) -> _Result:
        """Run the chain of every document; the next packs are launched while the device computes."""
        lengths = start.lengths
        assert len(lengths) == len(self.keys), "one key for each document"
        latent_shape = (len(lengths), *self.latent_shape)
        result = _Result([np.empty(0, np.int64)] * len(lengths), np.empty(latent_shape, np.float32))
        launched: deque[tuple[np.ndarray, np.ndarray, Fetched[Sampled]]] = deque()
        report = self._reporter(len(lengths) * len(steps))
        places = self.options.places(self.model.device)
        for indices in group_documents(lengths, self.latent_shape[0], places):
            launched.append((indices, lengths[indices], self._launch(start, indices, steps, report)))
            if len(launched) > PACKS_AHEAD:
                result.put(*launched.popleft())
        for waiting in launched:
            result.put(*waiting)
        return result

    def _launch(
        self, start: _Start, indices: np.ndarray, steps: list[Step], report: Callable[[int, float], None]
    ) -> Fetched[Sampled]:
        """The chain of one pack, and the copy of its results behind it."""
        predictor, corruption = ModelPredictor.of(self.model), self.model.corruption
        chosen = torch.from_numpy(indices)
        pack = start_pack(
            corruption, start.lengths[indices], self.keys[indices],
            None if start.latents is None else start.latents[chosen], self.latent_shape,
            tokens=None if start.tokens is None else [start.tokens[i] for i in indices],
            latent_time=start.latent_time,
            against=None if start.against is None else start.against[chosen],
            with_noise=self.options.guidance != 1.0 and start.against is None,
            tally=None if self.passes is None else Tally(self.passes, indices),
            device=self.model.device,
            arrange=predictor.arrange,
        )  # fmt: skip
        work = len(indices) * len(steps)
        return fetch(
            run_chain(predictor, pack, steps, corruption, self.options, lambda share: report(work, share))
        )

    def _reporter(self, total: int) -> Callable[[int, float], None]:
        done = 0

        def report(work: int, share: float) -> None:
            nonlocal done
            if self.progress is not None:
                self.progress(done + int(work * share), total)
            done += work if share >= 1.0 else 0

        return report
