"""Latents as vectors: how similar two of them are, and the normaliser between the encoder's space and the network's.

There is one similarity in the project: the cosine of each slot, averaged over the slots. `cosine` compares pairs,
`directions` prepares a matrix product that compares all with all and gives the same numbers.
Shapes: n documents, S latent slots, C latent channels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

if TYPE_CHECKING:  # a pair store is read without torch
    from torch import Tensor

Array = TypeVar("Array", np.ndarray, "Tensor")

DEAD_CHANNEL = 1e-3
"""A channel that varies less than this share of the typical one is scaled by that share instead."""
_ROWS_AT_ONCE = 4096
_SMALLEST = 1e-30


def cosine(left: Array, right: Array) -> Array:
    """(n,) mean over the slots of the cosine of each slot, of latents (n, S, C); a slot of zeros counts as 0.

    >>> import numpy as np
    >>> cosine(np.array([[[3.0, 0.0], [0.0, 1.0]]]), np.array([[[1.0, 0.0], [1.0, 0.0]]])).round(6).tolist()
    [0.5]
    """
    if isinstance(left, np.ndarray):
        return np.einsum("nc,nc->n", directions(left), directions(right))
    return (directions(left) * directions(right)).sum(-1)


def directions(latents: Array) -> Array:
    """(n, S * C) rows such that `directions(a) @ directions(b).T` holds the cosine of every a with every b.

    numpy arrays are computed in float64, tensors in the type they have.
    """
    if isinstance(latents, np.ndarray):
        sizes = np.linalg.norm(latents.astype(np.float64), axis=-1, keepdims=True)
        unit = latents / np.maximum(sizes, np.finfo(np.float64).tiny)
        return (unit / np.sqrt(latents.shape[1])).reshape(len(latents), math.prod(latents.shape[1:]))
    sizes = latents.norm(dim=-1, keepdim=True)
    return (latents / sizes.clamp(min=_SMALLEST) / latents.shape[1] ** 0.5).flatten(1)


def nearest(queries: np.ndarray, parts: Iterable[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Places and cosines, both (n, k), of the latents nearest to each query, nearest first; the earlier one of equals.

    The latents that are searched come in parts, each (m, S, C), so that they need not be in memory together.
    """
    wanted, start = directions(queries), 0
    best, index = np.empty((len(queries), 0)), np.empty((len(queries), 0), np.int64)
    for part in parts:
        near = wanted @ directions(part).T
        places = np.broadcast_to(np.arange(start, start + len(part)), near.shape)
        best, index = np.concatenate([best, near], axis=1), np.concatenate([index, places], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :count]
        best, index = np.take_along_axis(best, order, 1), np.take_along_axis(index, order, 1)
        start += len(part)
    return index, best


def between(first: np.ndarray, second: np.ndarray, num_points: int) -> np.ndarray:
    """(num_points, S, C) latents from one (S, C) to the other, both included, on the arc between their directions.

    The length goes evenly from the one to the other. Opposite directions have no arc of their own, and a latent of
    zeros has no direction: then it is a line.
    """
    share = np.linspace(0.0, 1.0, num_points)[:, None]
    a, b = first.reshape(-1).astype(np.float64), second.reshape(-1).astype(np.float64)
    size_a, size_b = float(np.linalg.norm(a)), float(np.linalg.norm(b))
    angle = np.arccos(np.clip(a @ b / max(size_a * size_b, _SMALLEST), -1.0, 1.0))
    if np.sin(angle) < 1e-6 or size_a * size_b < _SMALLEST:
        points = (1 - share) * a + share * b
    else:
        arc = (np.sin((1 - share) * angle) * a / size_a + np.sin(share * angle) * b / size_b) / np.sin(angle)
        points = arc * ((1 - share) * size_a + share * size_b)
    return points.reshape(num_points, *first.shape).astype(np.float32)


@dataclass(frozen=True, eq=False)
class Normalizer:
    """Mean and scale of each channel over the training split: the network works on (latents - mean) / scale."""

    mean: np.ndarray
    """float32, one number per channel, or (S, C)."""
    scale: np.ndarray

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """From the `mean` and `scale` that a pair store or an export carries."""
        return cls(*(np.asarray(value[key], dtype=np.float32) for key in ("mean", "scale")))

    def to_json(self) -> dict[str, Any]:
        """The inverse of `from_json`."""
        return {"mean": self.mean.tolist(), "scale": self.scale.tolist()}

    def normalize(self, latents: Array) -> Array:
        """The encoder's own latents (n, S, C) as the network sees them, float32."""
        if isinstance(latents, np.ndarray):
            return ((latents - self.mean) / self.scale).astype(np.float32)
        return (latents.float() - _like(self.mean, latents)) / _like(self.scale, latents)

    def denormalize(self, latents: Array) -> Array:
        """The inverse of `normalize`."""
        if isinstance(latents, np.ndarray):
            return (latents * self.scale + self.mean).astype(np.float32)
        return latents.float() * _like(self.scale, latents) + _like(self.mean, latents)


def _like(values: np.ndarray, latents: Tensor) -> Tensor:
    return latents.new_tensor(values, dtype=latents.float().dtype)


@dataclass
class Moments:
    """Count, mean and summed squared distance from the mean, per channel."""

    count: int
    mean: np.ndarray
    square: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray) -> Self:
        """Moments of the rows of (rows, C), as stored."""
        mean = values.mean(axis=0, dtype=np.float64)
        square = np.zeros_like(mean)
        for start in range(0, len(values), _ROWS_AT_ONCE):  # a float64 copy of a few rows at a time
            square += ((values[start : start + _ROWS_AT_ONCE].astype(np.float64) - mean) ** 2).sum(axis=0)
        return cls(len(values), mean, square)

    def merged(self, other: Moments) -> Moments:
        """Moments of both sets together (Chan et al.), without the cancellation of E[x^2] - E[x]^2."""
        count = self.count + other.count
        step = other.mean - self.mean
        mean = self.mean + step * (other.count / count)
        square = self.square + other.square + step**2 * (self.count * other.count / count)
        return Moments(count, mean, square)

    def to_json(self) -> dict[str, Any]:
        """Exact in JSON: Python writes floats so that they read back the same."""
        return {
            key: value.tolist() if isinstance(value, np.ndarray) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(value["count"], np.array(value["mean"]), np.array(value["square"]))


def fit_normalizer(parts: Sequence[Moments]) -> dict[str, list[float]]:
    """Mean and scale (standard deviation, with a floor) per channel, in float64 for the manifest."""
    total = parts[0]
    for part in parts[1:]:
        total = total.merged(part)
    deviation = np.sqrt(total.square / total.count)
    typical = float(np.sqrt((deviation**2).mean()))
    scale = np.maximum(deviation, DEAD_CHANNEL * typical) if typical > 0 else np.ones_like(deviation)
    return {"mean": total.mean.tolist(), "scale": scale.tolist()}
