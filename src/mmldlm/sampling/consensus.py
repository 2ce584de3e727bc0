"""One text of several: each place takes the token that most of the candidates have there, near ones counting more.

    weight of a candidate = exp(SHARPNESS * (its cosine - the largest cosine of its document))

Shapes: n documents, K candidates of each, T tokens of all documents.
"""

from __future__ import annotations

import numpy as np

from mmldlm.sampling.ragged import CHUNK_TOKENS, slices

SHARPNESS = 20.0
"""How fast the weight falls with the cosine: a candidate that is 0.05 farther counts about a third."""


def consensus(tokens: np.ndarray, lengths: np.ndarray, cosine: np.ndarray) -> list[np.ndarray]:
    """Texts (n,) from candidates (K, T) of these lengths (n,), with their cosines (K, n)."""
    weights, ends = candidate_weights(cosine), np.cumsum(lengths)
    found: list[np.ndarray] = []
    for part in slices(lengths * len(tokens), CHUNK_TOKENS):
        inside = slice(ends[part.start] - lengths[part.start], ends[part.stop - 1])
        chosen = heaviest_tokens(tokens[:, inside], np.repeat(weights[:, part], lengths[part], axis=1))
        found += np.split(chosen, np.cumsum(lengths[part])[:-1])
    return found


def candidate_weights(cosine: np.ndarray) -> np.ndarray:
    """(K, n) of these cosines (K, n); the nearest candidate has weight 1."""
    return np.exp(SHARPNESS * (cosine - cosine.max(0)))


def heaviest_tokens(tokens: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(T,) the token with the largest sum of weights (K, T); of equals, that of the earliest candidate."""
    support = np.stack([(weights * (tokens == mine)).sum(0) for mine in tokens])
    return tokens[support.argmax(0), np.arange(tokens.shape[1])].astype(np.int64)
