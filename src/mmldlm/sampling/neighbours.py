"""The texts of a split whose latents are nearest to given ones, by cosine, a part of the split at a time.

Shapes: n latents, S latent slots, C latent channels, k neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmldlm.data.store import Split
from mmldlm.latents import directions

PART = 8192
"""Documents of the split that are in memory at a time."""


def nearest(split: Split, latents: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices in the split and cosines, both (n, k), the nearest first; the earlier one of equals."""
    wanted = directions(latents)
    best = np.empty((len(latents), 0))
    index = np.empty((len(latents), 0), np.int64)
    for start in range(0, len(split), PART):
        part = np.arange(start, min(start + PART, len(split)))
        near = wanted @ directions(split.read(part).latents).T
        best = np.concatenate([best, near], axis=1)
        index = np.concatenate([index, np.broadcast_to(part, near.shape)], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :count]
        best, index = np.take_along_axis(best, order, 1), np.take_along_axis(index, order, 1)
    return index, best


def neighbour_records(split: Split, latents: np.ndarray, count: int) -> list[list[dict[str, Any]]]:
    """For each raw latent (n, S, C), text and cosine of its nearest pairs; null for a text that is not stored."""
    index, near = nearest(split, latents, count)
    texts = split.read_texts(index.reshape(-1))
    rows = [texts[i : i + index.shape[1]] for i in range(0, len(texts), index.shape[1])]
    return [
        [{"text": text, "cosine": float(value)} for text, value in zip(row, values, strict=True)]
        for row, values in zip(rows, near, strict=True)
    ]
