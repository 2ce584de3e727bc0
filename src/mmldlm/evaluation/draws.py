"""Several noisy draws of each document, cut into packs: what both bounds are estimated from.

Shapes: n documents, K draws per document, S latent slots, C latent channels.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from mmldlm.layout import packed_layout
from mmldlm.types import Batch


class Draws:
    """K entries for each of n documents. Whoever derives from it says which time each entry has."""

    def __init__(
        self, tokens: list[np.ndarray], lengths: np.ndarray, latents: np.ndarray, keys: np.ndarray
    ) -> None:
        """tokens and lengths of the n documents, latents (n, S, C) normalised, keys (n, K)."""
        self.tokens, self.lengths, self.latents = tokens, lengths, latents
        self.owner = np.repeat(np.arange(len(lengths)), keys.shape[1])
        self.keys = keys.reshape(-1)

    def packs(self, batch_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
        """Entries of each pack, with how many are done after it."""
        yield from pack_rows(self.lengths[self.owner], batch_tokens)

    def batch(self, rows: np.ndarray) -> Batch:
        """The documents of these entries, clean."""
        owner = self.owner[rows]
        return Batch(
            tokens=torch.from_numpy(np.concatenate([self.tokens[document] for document in owner])),
            latents=torch.from_numpy(self.latents[owner]),
            layout=packed_layout(self.lengths[owner], self.latents.shape[1]),
            positions=owner,
            keys=self.keys[rows],
        )


def pack_rows(lengths: np.ndarray, batch_tokens: int) -> Iterator[tuple[int, np.ndarray]]:
    """Cut consecutive documents into packs of at most `batch_tokens` tokens (at least one document each)."""
    start, ends = 0, np.cumsum(lengths)
    while start < len(lengths):
        used = ends[start - 1] if start else 0
        stop = max(int(np.searchsorted(ends, used + batch_tokens, side="right")), start + 1)
        yield stop, np.arange(start, stop)
        start = stop
