"""How good a decoded text is: it is turned back into a latent, which is compared with the one that was decoded.

Thousands of variants of texts are compared at a time, so they are kept in one array (`Ragged`).
Shapes: n documents, m texts to compare, S latent slots, C latent channels, N texts, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from mmldlm import randomness
from mmldlm.checkpoint.load import LoadedModel
from mmldlm.data.shard import ranges
from mmldlm.data.tokenizer import Tokenizer
from mmldlm.errors import UserError
from mmldlm.latents import cosine
from mmldlm.sampling.decode import encode_tokens
from mmldlm.sampling.options import SamplingOptions

ROUND = 2**41
"""Word of the keys of rounds; no step has such a number."""
MAX_PROBED = 32
"""Tokens of a text that are tried in turn in a round; of longer texts, so many drawn ones."""

CHUNK_TOKENS = 2**19
"""Tokens of variants that are held in memory at a time; enough to fill the batches of any encoder."""
Encode = Callable[[list[np.ndarray]], np.ndarray]
"""Texts (token ids) to raw latents (n, S, C), such as the encoder that made the training data."""


@dataclass
class Checked:
    """Texts with what is known about them."""

    tokens: list[np.ndarray]
    cosine: np.ndarray
    """(n,) float64, of the text's own latent to the one that was decoded."""
    first_cosine: np.ndarray
    """(n,) that of the first candidate before any round."""
    passes: np.ndarray
    """(n,) int64, passes of the model's network, for all candidates and rounds."""
    num_encoded: np.ndarray
    """(n,) int64, texts that were turned back into latents."""
    num_accepted: np.ndarray
    """(n,) int64, rounds that made the text better."""

    def rows(self) -> list[tuple[float, float, int, int, int]]:
        """For each text: cosine, first_cosine, passes, num_encoded, num_accepted."""
        counts = (self.passes, self.num_encoded, self.num_accepted)
        values = (self.cosine, self.first_cosine, *counts)
        return list(zip(*(value.tolist() for value in values), strict=True))

    def copy(self) -> Checked:
        """One that may be changed."""
        arrays = (self.cosine, self.first_cosine, self.passes, self.num_encoded, self.num_accepted)
        return Checked(list(self.tokens), *(values.copy() for values in arrays))


class Judge:
    """The latents that are decoded and how texts are compared with them."""

    def __init__(
        self,
        model: LoadedModel,
        latents: np.ndarray,
        options: SamplingOptions,
        drawn: SamplingOptions,
        keys: np.ndarray,
        encode: Encode | None,
        against: np.ndarray | None,
    ) -> None:
        self.model, self.latents, self.options, self.drawn, self.keys = model, latents, options, drawn, keys
        self.encode, self.against = encode, against
        self.raw = _raw(model, latents)
        self.reading = replace(options, guidance=1.0)  # a text is read as it stands, however it was decoded
        self.unwritten = unwritten_tokens(model)

    def cosine(
        self, texts: list[np.ndarray], owner: np.ndarray, passes: np.ndarray, encoded: np.ndarray
    ) -> np.ndarray:
        """(m,) cosine of each text's latent to that of its owner; the cost is added to the owner's."""
        np.add.at(encoded, owner, 1)
        sizes = np.array([len(text) for text in texts], np.int64)
        parts = [
            cosine(self._latents(texts[part], owner[part], passes), self.raw[owner[part]])
            for part in slices(sizes, CHUNK_TOKENS)
        ]
        return np.concatenate(parts) if parts else np.empty(0)

    def _latents(self, texts: list[np.ndarray], owner: np.ndarray, passes: np.ndarray) -> np.ndarray:
        """(m, S, C) raw."""
        if self.encode is not None:
            return _require_finite(self.encode(texts), "encoder")
        spent = np.zeros(len(texts), np.int64)
        latents = encode_tokens(self.model, texts, self.reading, keys=self.keys[owner], passes=spent)
        np.add.at(passes, owner, spent)
        return _require_finite(self.model.normalizer.denormalize(latents), "model")


def _require_finite(latents: np.ndarray, who: str) -> np.ndarray:
    """The latents; one that is no number would win or lose every comparison."""
    num_bad = int((~np.isfinite(latents).all(axis=(1, 2))).sum())
    if num_bad:
        other = "encoder" if who == "model" else "model"
        raise UserError(
            f"check={who}: the {who} gives NaN or infinity for {num_bad} of {len(latents)} decoded texts, so they "
            f"cannot be compared; use {other}, or decode without candidates and rounds"
        )
    return latents


def _raw(model: LoadedModel, latents: np.ndarray) -> np.ndarray:
    """(n, S, C) raw latents; what is only rounding is zero, so that a latent of zeros has no direction."""
    raw = model.normalizer.denormalize(latents)
    return np.where(
        np.abs(raw) <= 4 * np.finfo(np.float32).eps * np.abs(model.normalizer.mean), np.float32(0), raw
    )


@lru_cache(maxsize=1)
def _tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.load(path)


def unwritten_tokens(model: LoadedModel) -> np.ndarray:
    """Ids, in order, of tokens that are left out where ids become text, such as [SEP]; none without a tokenizer."""
    if model.tokenizer_path is None:
        return np.empty(0, np.int64)
    unwritten, vocab_size = _tokenizer(model.tokenizer_path).unwritten_ids(), model.corruption.vocab_size
    return np.array(sorted(token for token in unwritten if token < vocab_size), np.int64)


def probed_places(tokens: list[np.ndarray], keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are tried in turn: text and place of each."""
    owner: list[int] = []
    place: list[int] = []
    for i, text in enumerate(tokens):
        chosen = np.arange(len(text))
        if len(text) > MAX_PROBED:
            chance = randomness.uniform(keys[i], randomness.SHUFFLE, chosen)
            chosen = np.sort(np.argsort(chance, kind="stable")[:MAX_PROBED])
        owner += [i] * len(chosen)
        place += chosen.tolist()
    return np.array(owner, np.int64), np.array(place, np.int64)


@dataclass(frozen=True, eq=False)
class Ragged:
    """Token ids of texts, one after the other."""

    tokens: np.ndarray
    """(T,) int64, or something else that each token has."""
    lengths: np.ndarray
    """(N,) int64"""

    @classmethod
    def of(cls, texts: Sequence[np.ndarray]) -> Ragged:
        """These texts, of which there is at least one."""
        return cls(np.concatenate(texts).astype(np.int64), np.array([len(text) for text in texts], np.int64))

    @cached_property
    def starts(self) -> np.ndarray:
        """(N,) where each text begins."""
        return np.cumsum(self.lengths) - self.lengths

    def take(self, rows: np.ndarray) -> Ragged:
        """The texts at these rows, which may come again."""
        lengths = self.lengths[rows]
        return Ragged(self.tokens[ranges(self.starts[rows], lengths)], lengths)

    def put(self, rows: np.ndarray, places: np.ndarray, values: np.ndarray | int) -> Ragged:
        """The same texts with other tokens at these places of these rows."""
        tokens = self.tokens.copy()
        tokens[self.starts[rows] + places] = values
        return Ragged(tokens, self.lengths)

    def split(self) -> list[np.ndarray]:
        """The texts one by one."""
        bounds = zip(self.starts.tolist(), (self.starts + self.lengths).tolist(), strict=True)
        return [self.tokens[start:end] for start, end in bounds]


def slices(costs: np.ndarray, limit: int) -> Iterator[slice]:
    """Neighbours that together cost no more than the limit; what costs more comes alone."""
    ends, start = np.cumsum(costs), 0
    while start < len(costs):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield slice(start, stop)
        start = stop
