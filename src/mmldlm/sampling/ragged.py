"""Many texts as one array, so that thousands of variants of them are made without a loop in Python.

Shapes: N texts, T tokens of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmldlm.data.format import ranges

CHUNK_TOKENS = 2**19
"""Tokens of variants that are held in memory at a time; enough to fill the batches of any encoder."""


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
