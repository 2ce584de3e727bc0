"""The endless order of documents: a position is all the state there is.

Position p lies in epoch p // n at rank p % n; each epoch is a permutation of its own, evaluated only where asked,
so a store of any size is shuffled at once and without memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mmldlm import randomness


@dataclass(frozen=True)
class Order:
    """Which document stands at which position."""

    num_documents: int
    seed: int

    def epochs(self, positions: np.ndarray) -> np.ndarray:
        """Epoch of each position."""
        return positions // self.num_documents

    def epoch_of(self, position: int) -> float:
        """Passes over all documents that are done at a position."""
        return position / self.num_documents

    def documents(self, positions: np.ndarray) -> np.ndarray:
        """Index in the split of the document at each position."""
        epochs, ranks = np.divmod(positions, self.num_documents)
        indices = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            key = randomness.make_key(self.seed, randomness.ORDER, int(epoch))
            indices[here] = randomness.permute(ranks[here], self.num_documents, key)
        return indices


def document_keys(seed: int, epochs: np.ndarray, ids: np.ndarray, draw: int = 0) -> np.ndarray:
    """Each document's own source of randomness: a function of (seed, epoch, document, draw)."""
    return randomness.make_key(seed, epochs.astype(np.uint64), ids.astype(np.uint64), draw)
